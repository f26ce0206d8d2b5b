import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, beforeAll, describe, expect, inject, test } from "vitest";
import {
  Client,
  type Environment,
  ExecTimeoutError,
  ExistsError,
  HasChildrenError,
  NotFoundError,
  UsageError,
  WrongStateError,
} from "../src/index.js";
import { collect } from "../src/transport.js";

const client = new Client({ socket: inject("socket") });
let env: Environment;

beforeAll(async () => {
  env = await client.environments.create({ method: "waypoint_build", metadata: { suite: "environment" } });
});

afterAll(async () => {
  await env.destroy();
  client.close();
});

describe("commands", () => {
  test("state stays in the shell, streams are apart", async () => {
    await env.exec("cd /tmp; answer=42; greet() { echo hello $1; }");
    const result = await env.exec("echo $answer; greet you >&2; pwd; (exit 3)");
    expect(result).toMatchObject({ exit_code: 3, stdout: "42\n/tmp\n", stderr: "hello you\n", cwd: "/tmp" });
  });

  test("bytes in and out", async () => {
    const every = Uint8Array.from({ length: 256 }, (_, code) => code);
    const result = await env.exec("cat", { stdin: every, encoding: "base64" });
    expect(Buffer.from(result.stdout, "base64").equals(every)).toBe(true);
    const odd = await env.exec(Buffer.from([...Buffer.from("printf '"), 0xff, 0xfe, ...Buffer.from("'")]), { encoding: "base64" });
    expect([...Buffer.from(odd.stdout, "base64")]).toEqual([0xff, 0xfe]);
  });

  test("run: a program beside the shell", async () => {
    const result = await env.run(["sh", "-c", 'echo "$COLOUR $1"; pwd', "sh", "a'b"], { env: { COLOUR: "blue" }, cwd: "/usr" });
    expect(result.stdout).toBe("blue a'b\n/usr\n");
    expect((await env.run(["surely-no-such-program"])).exit_code).toBe(127);
  });

  test("a timeout carries what was printed", async () => {
    const error = await env.exec("echo part; sleep 60", { timeout: 0.5 }).catch((error: unknown) => error);
    expect(error).toBeInstanceOf(ExecTimeoutError);
    expect(error).toMatchObject({ code: "timeout", result: { stdout: "part\n", timed_out: true } });
    const streamed = await env.stream("echo part; sleep 60", { timeout: 0.5 }).result().catch((error: unknown) => error);
    expect(streamed).toMatchObject({ code: "timeout", result: { stdout: "part\n" } });
  });

  test("a stream is live", async () => {
    const stream = env.stream("echo first; while ! [ -e /tmp/seen ]; do sleep 0.05; done; echo second >&2");
    const seen: [string, string][] = [];
    for await (const { stream: name, data } of stream) {
      if (seen.length === 0) await env.run(["touch", "/tmp/seen"]);
      seen.push([name, data.toString()]);
    }
    expect(seen).toEqual([["stdout", "first\n"], ["stderr", "second\n"]]);
    expect(await stream.result()).toMatchObject({ exit_code: 0, output: "first\nsecond\n" });
  });

  test("leave a command, and come back to it", async () => {
    const stream = env.stream("echo begun; while ! [ -e /tmp/go ]; do sleep 0.05; done; echo over");
    for await (const _ of stream) break;
    const running = (await env.commands()).filter((command) => command.state === "running");
    expect(running.map((command) => command.id)).toEqual([stream.command]);
    const again = env.attach(String(stream.command));
    await env.files.write("/tmp/go", "");
    expect((await again.result()).stdout).toBe("begun\nover\n");
    const sleeper = env.stream("echo begun; sleep 600");
    for await (const _ of sleeper) await env.signal(String(sleeper.command));
    expect((await sleeper.result()).exit_code).toBe(130);
  });
});

describe("states", () => {
  test("snapshot, restore, pause, resume", async () => {
    await env.exec("cd /tmp; n=1; echo one >/tmp/file");
    const snapshot = await env.snapshot("one");
    expect(snapshot).toMatchObject({ name: "one", captured: expect.arrayContaining(["files", "memory"]) });
    await env.exec("n=2; echo two >/tmp/file; echo new >/tmp/new");
    expect(await env.diff("one")).toMatchObject({ added: ["/tmp/new"], changed: ["/tmp/file"] });
    expect(await env.restore(snapshot)).toMatchObject({ snapshot: snapshot.id, shell_restarted: false });
    expect((await env.exec("echo $n; cat /tmp/file")).stdout).toBe("1\none\n");
    await env.pause();
    expect((await env.info()).state).toBe("paused");
    await expect(env.exec("true")).rejects.toBeInstanceOf(WrongStateError);
    await env.resume();
    expect((await env.exec("echo $n")).stdout).toBe("1\n");
    await expect(env.snapshot("one")).rejects.toBeInstanceOf(ExistsError);
    await expect(env.restore("surely-not")).rejects.toBeInstanceOf(NotFoundError);
  });

  test("fork, evaluate, keep", async () => {
    await using base = await client.environments.create();
    await base.exec("cd /tmp; x=5");
    const forks = await base.fork(3);
    const scores = await Promise.all(
      forks.map(async (fork, index) => Number((await fork.exec(`x=$((x + ${[1, 9, 4][index]})); echo $x`)).stdout)),
    );
    expect(scores).toEqual([6, 14, 9]);
    const best = scores.indexOf(Math.max(...scores));
    await Promise.all(forks.filter((_, index) => index !== best).map((fork) => fork.destroy()));
    expect((await forks[best]?.exec("echo $x"))?.stdout).toBe("14\n");
    expect((await base.exec("echo $x")).stdout).toBe("5\n");
    expect((await base.tree()).text).toContain(forks[best]?.id);
    await forks[best]?.destroy();
    const { environments, errors } = await base.tryFork(2);
    expect([environments.length, errors.length]).toEqual([2, 0]);
    await Promise.all(environments.map((fork) => fork.destroy()));
  });

  test("await using destroys it", async () => {
    let id: string;
    {
      await using short = await client.environments.create();
      id = short.id;
    }
    await expect(client.environments.get(id)).rejects.toBeInstanceOf(NotFoundError);
    const again = await client.environments.create();
    await again.destroy();
    await again.destroy();
    await expect(again.exec("true")).rejects.toBeInstanceOf(WrongStateError);
  });

  test("snapshots: pinned, renamed, removed, made into environments", async () => {
    const base = await client.environments.create();
    const first = await base.snapshot("first");
    await base.snapshot("second");
    await expect(base.removeSnapshot("first")).rejects.toBeInstanceOf(HasChildrenError);
    expect((await base.updateSnapshot("first", { name: "kept", pinned: true })).name).toBe("kept");
    expect((await base.snapshotDetail("kept")).manifest).toBeTypeOf("object");
    await base.destroy();
    expect((await client.snapshots()).map((one) => one.id)).toContain(first.id);
    await using again = await client.environments.create({ snapshot: first.id });
    expect((await again.exec("echo back")).stdout).toBe("back\n");
    await again.updateSnapshot(first.id, { pinned: false });
  });
});

describe("files", () => {
  test("written, read, listed, moved, removed", async () => {
    const data = Buffer.from(Array.from({ length: 5000 }, (_, at) => at % 256));
    await env.files.write("/tmp/ts/dir with space/data.bin", data, { mode: 0o640 });
    expect((await env.files.read("/tmp/ts/dir with space/data.bin")).equals(data)).toBe(true);
    expect(await env.files.stat("/tmp/ts/dir with space/data.bin")).toMatchObject({ kind: "file", mode: 0o640, size_bytes: 5000 });
    await env.files.makeDirectory("/tmp/ts/é");
    expect((await env.files.list("/tmp/ts")).map((file) => [file.name, file.kind])).toEqual([
      ["dir with space", "directory"],
      ["é", "directory"],
    ]);
    await env.files.move("/tmp/ts/é", "/tmp/ts/e");
    await expect(env.files.remove("/tmp/ts")).rejects.toBeInstanceOf(UsageError);
    await env.files.remove("/tmp/ts", { recursive: true });
    await expect(env.files.readText("/tmp/ts/e")).rejects.toBeInstanceOf(NotFoundError);
  });

  test("directories as tar streams", async () => {
    const here = mkdtempSync(join(tmpdir(), "ts-tar-"));
    try {
      writeFileSync(join(here, "note"), "from the host\n");
      await env.files.upload(execFileSync("tar", ["-c", "-C", here, "note"]), "/tmp/tarred");
      expect((await env.exec("cat /tmp/tarred/note")).stdout).toBe("from the host\n");
      await env.exec("echo changed >/tmp/tarred/note");
      execFileSync("tar", ["-x", "-C", here], { input: await collect(await env.files.download("/tmp/tarred")) });
      expect(readFileSync(join(here, "note"), "utf-8")).toBe("changed\n");
    } finally {
      rmSync(here, { recursive: true });
    }
  });

  test("watched", async () => {
    await env.files.makeDirectory("/tmp/watched");
    const changes = env.files.watch("/tmp/watched", { interval: 0.1 });
    const first = changes.next();
    // The watch begins somewhere after this line: touch a new name until it is seen.
    const toucher = setInterval(() => void env.run(["touch", `/tmp/watched/${Date.now()}`]), 200);
    try {
      expect((await first).value).toMatchObject({ kind: "added", path: expect.stringContaining("/tmp/watched/") });
    } finally {
      clearInterval(toucher);
      await changes.return(undefined);
    }
  });
});

test("lists, terms, records", async () => {
  const found = await client.environments.list({ metadata: { suite: "environment" }, state: "live" });
  expect(found.map((one) => one.id)).toEqual([env.id]);
  expect((await client.environments.get(env.id.slice(0, -2))).id).toBe(env.id);
  expect((await env.update({ ttl_seconds: 600 })).expires_at).not.toBeNull();
  expect((await env.update({ ttl_seconds: null })).expires_at).toBeNull();
  expect((await env.history()).map((one) => one.operation)).toContain("exec");
  expect((await env.usage()).live_seconds).toBeGreaterThan(0);
  expect((await client.backends()).map((one) => one.name)).toContain("waypoint");
});
