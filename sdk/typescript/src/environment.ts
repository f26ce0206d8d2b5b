/** One environment of the daemon. */

import { NotFoundError, WrongStateError } from "./errors.js";
import { Files } from "./files.js";
import { ExecStream } from "./stream.js";
import { pathOf, type Request, type Transport } from "./transport.js";
import type {
  CommandInfo,
  Diff,
  EnvironmentInfo,
  ExecOptions,
  ExecResult,
  ForkError,
  ForkOptions,
  Operation,
  PatchEnvironment,
  PatchSnapshot,
  Restored,
  RunOptions,
  Snapshot,
  SnapshotDetail,
  SnapshotOptions,
  StreamOptions,
  Tree,
  Usage,
} from "./types.js";

type Data = string | Uint8Array;

/** `await using` destroys it at the end of its scope. Without that it stays, whatever becomes of this process. */
export class Environment implements AsyncDisposable {
  readonly id: string;
  readonly backend: string;
  readonly capabilities: EnvironmentInfo["capabilities"];
  readonly files: Files;
  readonly #transport: Transport;
  #destroyed = false;

  constructor(transport: Transport, info: EnvironmentInfo) {
    this.id = info.id;
    this.backend = info.backend;
    this.capabilities = info.capabilities;
    this.#transport = transport;
    this.files = new Files(transport, (...parts) => this.#path(...parts));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.destroy();
  }

  // -- commands ------------------------------------------------------------------------------------------------------

  /**
   * Evaluate a command in the persistent shell: `cd`, `export`, functions and jobs stay for the next one. A non-zero exit code
   * is a result; that it outlived `timeout` (seconds) is an ExecTimeoutError with the partial result.
   */
  async exec(command: Data, options: ExecOptions = {}): Promise<ExecResult> {
    return this.#json(this.#exec(command, options));
  }

  /** Run a program beside the shell: no quoting, no shared state, several at once. */
  async run(argv: string[], options: RunOptions = {}): Promise<ExecResult> {
    const { stdin, ...rest } = options;
    return this.#json({ method: "POST", path: this.#path("run"), body: { argv, ...rest, ...told("stdin", stdin) }, once: true });
  }

  /** The output as it comes: `for await (const { stream, data } of env.stream("make"))`. */
  stream(command: Data, options: StreamOptions = {}): ExecStream {
    return new ExecStream(this.#transport, { ...this.#exec(command, options), once: false }, this.#path("commands"));
  }

  /** Come back to a command by its id: what is still known of its output, and what comes. */
  attach(command: string): ExecStream {
    return new ExecStream(this.#transport, { method: "GET", path: this.#path("commands", command, "output") }, this.#path("commands"));
  }

  /** Those under way, and those that ended lately after their caller had left. */
  async commands(): Promise<CommandInfo[]> {
    return this.#transport.pages(this.#path("commands"));
  }

  async signal(command: string, signal = "INT"): Promise<void> {
    await this.#transport.bytes({ method: "POST", path: this.#path("commands", command, "signal"), body: { signal } });
  }

  // -- states --------------------------------------------------------------------------------------------------------

  /** Store the present state: files, processes, memory, the shell; and go on. */
  async snapshot(name?: string, options: SnapshotOptions = {}): Promise<Snapshot> {
    return this.#json({ method: "POST", path: this.#path("snapshots"), body: { name: name ?? null, ...options }, once: true });
  }

  /** Go back, or sideways, to a snapshot by id, name or unique prefix. If that fails, what is live goes on. */
  async restore(snapshot: string | Snapshot): Promise<Restored> {
    return this.#json({ method: "POST", path: this.#path("restore"), body: { snapshot: idOf(snapshot) }, once: true });
  }

  /** `n` live, independent copies, of the present state or of a snapshot. All or none. */
  async fork(n = 1, options: ForkOptions = {}): Promise<Environment[]> {
    return (await this.#fork({ n, ...options })).environments;
  }

  /** The same, keeping those that came up and saying of the others why they did not. */
  async tryFork(n: number, options: ForkOptions = {}): Promise<{ environments: Environment[]; errors: ForkError[] }> {
    return this.#fork({ n, ...options, return_errors: true });
  }

  /** Release the CPU, and the memory where the backend can. */
  async pause(): Promise<void> {
    await this.#transport.bytes({ method: "POST", path: this.#path("pause") });
  }

  async resume(): Promise<void> {
    await this.#transport.bytes({ method: "POST", path: this.#path("resume") });
  }

  /** End it; the last of a tree takes the snapshots along, unless one is pinned. Calling it again does nothing. */
  async destroy(): Promise<void> {
    if (this.#destroyed) return;
    try {
      await this.#transport.bytes({ method: "DELETE", path: this.#path() });
    } catch (error) {
      if (!(error instanceof NotFoundError)) throw error; // somebody else did, or its time was over
    }
    this.#destroyed = true;
  }

  // -- records -------------------------------------------------------------------------------------------------------

  /** As the daemon knows it now. */
  async info(): Promise<EnvironmentInfo> {
    return this.#json({ method: "GET", path: this.#path() });
  }

  /** Metadata, time-to-live, idle time; what is left out stays, null takes a limit away. */
  async update(changes: PatchEnvironment): Promise<EnvironmentInfo> {
    return this.#json({ method: "PATCH", path: this.#path(), body: changes });
  }

  /** All of its tree, oldest first: forks share it. */
  async snapshots(): Promise<Snapshot[]> {
    return this.#transport.pages(this.#path("snapshots"));
  }

  /** One, with what the backend wrote down about it. */
  async snapshotDetail(snapshot: string): Promise<SnapshotDetail> {
    return this.#json({ method: "GET", path: this.#path("snapshots", snapshot) });
  }

  /** Rename it, pin it. */
  async updateSnapshot(snapshot: string, changes: PatchSnapshot): Promise<Snapshot> {
    return this.#json({ method: "PATCH", path: this.#path("snapshots", snapshot), body: changes });
  }

  /** Free its storage. Refused while it has children (unless `cascade`) or a live environment on it. */
  async removeSnapshot(snapshot: string, options: { cascade?: boolean } = {}): Promise<void> {
    const query = { cascade: options.cascade ?? false };
    await this.#transport.bytes({ method: "DELETE", path: this.#path("snapshots", snapshot), query });
  }

  /** Who came from whom; `text` is the same, drawn. */
  async tree(): Promise<Tree> {
    return this.#json({ method: "GET", path: this.#path("tree") });
  }

  /** What changed from snapshot `a` to snapshot `b`, or to the present state. */
  async diff(a: string | Snapshot, b?: string | Snapshot): Promise<Diff> {
    const query = { a: idOf(a), b: b === undefined ? undefined : idOf(b) };
    return this.#json({ method: "GET", path: this.#path("diff"), query });
  }

  async usage(): Promise<Usage> {
    return this.#json({ method: "GET", path: this.#path("usage") });
  }

  async history(): Promise<Operation[]> {
    return this.#transport.pages(this.#path("history"));
  }

  // -- inside --------------------------------------------------------------------------------------------------------

  async #fork(body: object): Promise<{ environments: Environment[]; errors: ForkError[] }> {
    const made = await this.#json<{ environments: EnvironmentInfo[]; errors: ForkError[] }>({
      method: "POST",
      path: this.#path("fork"),
      body,
      once: true,
    });
    return { environments: made.environments.map((info) => new Environment(this.#transport, info)), errors: made.errors };
  }

  #exec(command: Data, options: ExecOptions): Request {
    const { stdin, ...rest } = options;
    return { method: "POST", path: this.#path("exec"), body: { ...told("command", command), ...rest, ...told("stdin", stdin) }, once: true };
  }

  #json<T>(request: Request): Promise<T> {
    return this.#transport.json<T>(request);
  }

  #path(...parts: string[]): string {
    if (this.#destroyed) throw new WrongStateError(`environment ${this.id} is destroyed`, { code: "wrong_state" });
    return pathOf("environments", this.id, ...parts);
  }
}

function idOf(snapshot: string | Snapshot): string {
  return typeof snapshot === "string" ? snapshot : snapshot.id;
}

function told(name: string, data: Data | undefined): object {
  if (data === undefined) return {};
  return typeof data === "string" ? { [name]: data } : { [`${name}_base64`]: Buffer.from(data).toString("base64") };
}
