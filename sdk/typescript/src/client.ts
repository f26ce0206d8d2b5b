/** The daemon, and the environments that it looks after. */

import { Environment } from "./environment.js";
import { type ClientOptions, pathOf, Transport } from "./transport.js";
import type { Backend, CreateEnvironment, EnvironmentInfo, Snapshot } from "./types.js";

export interface Filter {
  state?: EnvironmentInfo["state"];
  backend?: string;
  tree?: string;
  metadata?: Record<string, string>;
}

export class Environments {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Make one of a method and its arguments, or from a `snapshot`; ready when it is returned. Asked again, it is made once. */
  async create(wanted: CreateEnvironment = {}): Promise<Environment> {
    const info = await this.#transport.json<EnvironmentInfo>({
      method: "POST",
      path: pathOf("environments"),
      body: wanted,
      once: true,
    });
    return new Environment(this.#transport, info);
  }

  /** Come back to one, by its id or a prefix that fits only one. */
  async get(id: string): Promise<Environment> {
    return new Environment(this.#transport, await this.#transport.json({ method: "GET", path: pathOf("environments", id) }));
  }

  /** Those that this token may see, oldest first. */
  async list(filter: Filter = {}): Promise<EnvironmentInfo[]> {
    const metadata = Object.entries(filter.metadata ?? {}).map(([name, value]) => `${name}=${value}`);
    return this.#transport.pages(pathOf("environments"), { ...filter, metadata });
  }
}

export class Client implements Disposable {
  readonly environments: Environments;
  readonly #transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.#transport = new Transport(options);
    this.environments = new Environments(this.#transport);
  }

  /** Of all trees, oldest first; pinned ones outlive their environments. */
  async snapshots(): Promise<Snapshot[]> {
    return this.#transport.pages(pathOf("snapshots"));
  }

  /** What environments can be made of: methods, and the names of their arguments. */
  async backends(): Promise<Backend[]> {
    return (await this.#transport.json<{ items: Backend[] }>({ method: "GET", path: pathOf("backends") })).items;
  }

  /** Close idle connections. Environments stay. */
  close(): void {
    this.#transport.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}
