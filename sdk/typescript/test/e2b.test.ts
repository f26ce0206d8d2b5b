/** The `e2b` package, unmodified, pointed at the daemon. */

import { CommandExitError, FileNotFoundError, NotFoundError, Sandbox, SandboxError, TimeoutError } from "e2b";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Client } from "../src/index.js";
import { Daemon, freePort, until } from "./daemon.js";

const daemon = new Daemon();
const options = { apiKey: "", apiUrl: "", sandboxUrl: "" };
let sandbox: Sandbox;

beforeAll(async () => {
  const port = await freePort();
  options.apiKey = daemon.token("admin");
  options.apiUrl = options.sandboxUrl = `http://127.0.0.1:${port}`;
  await daemon.start(port);
  // `base` is this host: another home keeps the profiles of its users, and their locks, out of it.
  const envs = { GIVEN: "yes", HOME: "/srv" };
  sandbox = await Sandbox.create("base", { timeoutMs: 600_000, metadata: { of: "node" }, envs, ...options });
});

afterAll(async () => {
  const client = new Client({ url: options.apiUrl, token: options.apiKey });
  for (const left of await client.environments.list()) await (await client.environments.get(left.id)).destroy();
  client.close();
  await daemon.stop();
});

describe("commands", () => {
  test("have output, a code, and surroundings", async () => {
    let streamed = "";
    const done = await sandbox.commands.run("echo $GIVEN; pwd; echo bad >&2", { cwd: "/tmp", onStdout: (data) => void (streamed += data) });
    expect([done.stdout, done.stderr, done.exitCode, streamed]).toEqual(["yes\n/tmp\n", "bad\n", 0, "yes\n/tmp\n"]);
    await expect(sandbox.commands.run("exit 3")).rejects.toSatisfy((error) => error instanceof CommandExitError && error.exitCode === 3);
    await expect(sandbox.commands.run("sleep 60", { timeoutMs: 1000 })).rejects.toBeInstanceOf(TimeoutError);
  });

  test("are fed, connected to, and killed", async () => {
    const fed = await sandbox.commands.run("cat; echo end", { background: true, stdin: true });
    await sandbox.commands.sendStdin(fed.pid, "in\n");
    await fed.closeStdin();
    expect((await fed.wait()).stdout).toBe("in\nend\n");
    const long = await sandbox.commands.run("sleep 1000", { background: true, timeoutMs: 0 });
    expect((await sandbox.commands.list()).map((one) => one.pid)).toContain(long.pid);
    const again = await sandbox.commands.connect(long.pid);
    expect(await long.kill()).toBe(true);
    await expect(again.wait()).rejects.toThrow(/killed/);
    await expect(sandbox.commands.connect(long.pid)).rejects.toBeInstanceOf(NotFoundError);
  });

  test("have terminals", async () => {
    let screen = "";
    const onData = (data: Uint8Array) => void (screen += new TextDecoder().decode(data));
    const terminal = await sandbox.pty.create({ rows: 24, cols: 80, onData, timeoutMs: 60_000 });
    await sandbox.pty.resize(terminal.pid, { rows: 33, cols: 99 });
    await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode("stty size; exit\n"));
    await terminal.wait();
    expect(screen).toContain("33 99");
  });
});

describe("files", () => {
  test("are written, read, looked at, moved and removed", async () => {
    await sandbox.files.write("/srv/js/a", "hällo");
    await sandbox.files.write([
      { path: "/srv/js/b", data: "1" },
      { path: "/srv/js/c", data: new Blob([new Uint8Array([0, 255])]) },
    ]);
    expect(await sandbox.files.read("/srv/js/a")).toBe("hällo");
    expect(await sandbox.files.read("/srv/js/c", { format: "bytes" })).toEqual(new Uint8Array([0, 255]));
    expect((await sandbox.files.list("/srv/js")).map((one) => [one.name, one.size])).toEqual([["a", 6], ["b", 1], ["c", 2]]);
    expect(await sandbox.files.makeDir("/srv/js/d")).toBe(true);
    expect(await sandbox.files.makeDir("/srv/js/d")).toBe(false);
    expect((await sandbox.files.rename("/srv/js/a", "/srv/js/d/e")).path).toBe("/srv/js/d/e");
    await sandbox.files.remove("/srv/js/d");
    expect(await sandbox.files.exists("/srv/js/d/e")).toBe(false);
    await expect(sandbox.files.read("/srv/nope")).rejects.toBeInstanceOf(FileNotFoundError);
  });

  test("are watched, and linked to", async () => {
    await sandbox.files.makeDir("/srv/watched");
    const seen: string[] = [];
    const handle = await sandbox.files.watchDir("/srv/watched", (event) => void seen.push(`${event.type} ${event.name}`));
    await sandbox.files.write("/srv/watched/new", "linked");
    await until("it was told", async () => seen.includes("create new") && seen.includes("write new"));
    await handle.stop();
    const link = await sandbox.downloadUrl("/srv/watched/new", { useSignatureExpiration: 60_000 });
    expect(await (await fetch(link)).text()).toBe("linked");
    expect((await fetch(link.replace("new", "old"))).status).toBe(401);
  });
});

describe("sandboxes", () => {
  test("are found, forked, stored and paused", async () => {
    const listed = await Sandbox.list({ query: { metadata: { of: "node" } }, ...options }).nextItems();
    expect(listed.map((one) => one.sandboxId)).toEqual([sandbox.sandboxId]);
    await sandbox.files.write("/srv/state", "before");
    const snapshot = await sandbox.createSnapshot();
    const copies = (await sandbox.fork({ count: 2 })).filter((one) => one instanceof Sandbox);
    expect(copies.length).toBe(2);
    copies.push(await Sandbox.create(snapshot.snapshotId, options));
    await sandbox.files.write("/srv/state", "after");
    for (const copy of copies) {
      expect(await copy.files.read("/srv/state")).toBe("before");
      await copy.kill();
    }
    expect(await Sandbox.deleteSnapshot(snapshot.snapshotId, options)).toBe(true);
    expect(await sandbox.pause()).toBe(true);
    expect(await sandbox.isRunning()).toBe(false);
    await expect(sandbox.commands.run("true")).rejects.toBeInstanceOf(SandboxError);
    const again = await Sandbox.connect(sandbox.sandboxId, options);
    expect(await again.files.read("/srv/state")).toBe("after");
  });

  test("that cannot be made say why", async () => {
    await expect(Sandbox.create("nowhere", options)).rejects.toThrow(/'nowhere' not found/);
    await expect(Sandbox.create("base", { ...options, apiKey: "e2b_wrong" })).rejects.toThrow(/credentials/);
    expect(await sandbox.kill()).toBe(true);
    expect(await sandbox.kill()).toBe(false);
  });
});
