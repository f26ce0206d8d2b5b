import { execFileSync } from "node:child_process";
import { createServer, connect, type Server } from "node:net";
import { existsSync, rmSync } from "node:fs";
import { join } from "node:path";
import { expect, inject, test } from "vitest";
import { Client, ForbiddenError, NotFoundError, OverloadedError, UnauthenticatedError, UnreachableError } from "../src/index.js";
import { Daemon, until } from "./daemon.js";

const socket = inject("socket");
const home = join(socket, "..");

/** Passes everything on to the daemon, but hangs up instead of passing on the next `cut` answers. */
function cutter(path: string): { cut: number; server: Server } {
  const state = { cut: 0, server: createServer() };
  state.server.on("connection", (near) => {
    const far = connect(socket);
    near.on("error", () => far.destroy()).on("close", () => far.destroy());
    far.on("error", () => near.destroy()).on("close", () => near.destroy());
    near.pipe(far);
    far.on("data", (data) => {
      if (state.cut > 0) {
        state.cut -= 1;
        near.destroy();
      } else near.write(data);
    });
  });
  state.server.listen(path);
  return state;
}

function token(...options: string[]): string {
  const statefork = process.env.STATEFORK ?? join(import.meta.dirname ?? ".", "../../../.venv/bin/statefork");
  return execFileSync(statefork, ["token", "create", ...options], { env: { ...process.env, STATEFORK_HOME: home } }).toString().trim();
}

test("what makes something is made once, however often the connection breaks", async () => {
  const path = join(home, "cut.sock");
  const between = cutter(path);
  const client = new Client({ socket: path });
  const direct = new Client({ socket });
  try {
    const before = (await client.environments.list()).length;
    between.cut = 2;
    await using env = await client.environments.create();
    expect(between.cut).toBe(0);
    expect((await client.environments.list()).length).toBe(before + 1);
    between.cut = 1;
    expect((await env.exec("count=$((count + 1)); echo $count")).stdout).toBe("1\n");
    await env.files.write("/tmp/a", "x");
    between.cut = 1;
    await expect(env.files.move("/tmp/a", "/tmp/b")).rejects.toThrow(/not known/);
    expect(await env.files.readText("/tmp/b")).toBe("x");
    between.cut = 1;
    await env.files.remove("/tmp/b");
    await expect(env.files.remove("/tmp/b")).rejects.toBeInstanceOf(NotFoundError);
    const stream = env.stream("seq 50; while ! [ -e /tmp/cut ]; do sleep 0.05; done; seq 51 100");
    let seen = "";
    for await (const { data } of stream) {
      seen += data.toString();
      if (!seen.endsWith("\n50\n")) continue;
      between.cut = 1;
      await (await direct.environments.get(env.id)).files.write("/tmp/cut", "");
    }
    expect(seen.trimEnd().split("\n")).toEqual(Array.from({ length: 100 }, (_, at) => `${at + 1}`));
    expect(between.cut).toBe(0);
  } finally {
    client.close();
    direct.close();
    between.server.close();
    if (existsSync(path)) rmSync(path);
  }
});

test("tokens", async () => {
  const wrong = new Client({ socket, token: "sft_wrong" });
  await expect(wrong.environments.list()).rejects.toBeInstanceOf(UnauthenticatedError);
  const reader = new Client({ socket, token: token("--scope", "read") });
  await expect(reader.environments.create()).rejects.toBeInstanceOf(ForbiddenError);
  const none = new Client({ socket, token: token("--scope", "admin", "--max-environments", "0") });
  await expect(none.environments.create()).rejects.toBeInstanceOf(OverloadedError);
  for (const client of [wrong, reader, none]) client.close();
});

test("no daemon is said at once", async () => {
  await expect(new Client({ socket: "/nonexistent.sock" }).environments.list()).rejects.toThrow(/statefork serve/);
  await expect(new Client({ url: "http://127.0.0.1:9", token: "x" }).environments.list()).rejects.toBeInstanceOf(UnreachableError);
});

test("the daemon is killed and comes back", async () => {
  const daemon = new Daemon();
  await daemon.start();
  const client = new Client({ socket: daemon.socket });
  try {
    await using env = await client.environments.create();
    await env.snapshot("before");
    const called = env.exec("while ! [ -e /tmp/go ]; do sleep 0.05; done; echo called");
    await until("it runs", async () => (await env.commands()).some((command) => command.kind === "exec" && command.state === "running"));
    await daemon.kill();
    await daemon.start();
    expect((await env.snapshots()).map((one) => one.name)).toEqual(["before"]);
    await env.files.write("/tmp/go", "");
    expect((await called).stdout).toBe("called\n");
  } finally {
    client.close();
    await daemon.stop();
  }
});
