/** A real `statefork serve`: its own process, its own state directory. */

import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync } from "node:fs";
import { request } from "node:http";
import { type AddressInfo, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const ROOT = resolve(import.meta.dirname ?? ".", "../../..");
const STATEFORK = process.env.STATEFORK ?? join(ROOT, ".venv/bin/statefork");

export class Daemon {
  readonly home = mkdtempSync(join(tmpdir(), "statefork-ts-"));
  readonly socket = join(this.home, "s.sock");
  #process: ChildProcess | undefined;

  /** On its socket, or on a port of the loopback: then every request needs a token. */
  async start(port?: number): Promise<void> {
    const { WAYPOINT_HOME: _, ...env } = process.env;
    const log = openSync(join(this.home, "serve.log"), "a");
    const where = port === undefined ? ["--socket", this.socket] : ["--host", "127.0.0.1", "--port", String(port)];
    this.#process = spawn(STATEFORK, ["serve", ...where], {
      env: { ...env, STATEFORK_HOME: this.home },
      stdio: ["ignore", log, log],
    });
    closeSync(log);
    await until("the daemon is ready", async () => {
      if (this.#process?.exitCode !== null) throw new Error(readFileSync(join(this.home, "serve.log"), "utf-8").slice(-3000));
      return (await status(port === undefined ? { socketPath: this.socket } : { host: "127.0.0.1", port })) === 200;
    });
  }

  token(scope: string): string {
    const env = { ...process.env, STATEFORK_HOME: this.home };
    return execFileSync(STATEFORK, ["token", "create", "--scope", scope], { env }).toString().trim();
  }

  /** -9: it has no time for anything. */
  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  /** It leaves environments alone: delete them before. */
  async stop(): Promise<void> {
    await this.#end("SIGTERM");
    rmSync(this.home, { recursive: true, force: true });
  }

  async #end(signal: NodeJS.Signals): Promise<void> {
    const child = this.#process;
    if (child === undefined || child.exitCode !== null) return;
    const ended = once(child, "exit");
    child.kill(signal);
    await ended;
  }
}

export async function until(what: string, check: () => Promise<boolean>, seconds = 60): Promise<void> {
  for (const deadline = Date.now() + seconds * 1000; !(await check()); await sleep(30)) {
    if (Date.now() > deadline) throw new Error(`not within ${seconds} s: ${what}`);
  }
}

/** A port that nobody listens on. */
export async function freePort(): Promise<number> {
  const probe = createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address() as AddressInfo;
  probe.close();
  await once(probe, "close");
  return port;
}

function status(where: { socketPath: string } | { host: string; port: number }): Promise<number> {
  return new Promise((done) => {
    const sent = request({ ...where, path: "/readyz" }, (response) => {
      response.resume();
      done(response.statusCode ?? 0);
    });
    sent.on("error", () => done(0));
    sent.end();
  });
}
