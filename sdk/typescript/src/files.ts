/** Files of an environment. Paths are absolute inside it. Directories go as tar streams: bring your own `tar`. */

import type { Readable } from "node:stream";
import { events } from "./stream.js";
import type { Request, Transport } from "./transport.js";
import type { FileInfo } from "./types.js";

export interface Change {
  kind: "added" | "changed" | "removed";
  path: string;
}

export class Files {
  readonly #transport: Transport;
  readonly #path: (...parts: string[]) => string;

  constructor(transport: Transport, path: (...parts: string[]) => string) {
    this.#transport = transport;
    this.#path = path;
  }

  async read(path: string): Promise<Buffer> {
    return this.#transport.bytes(this.#request("GET", ["content"], { path }));
  }

  async readText(path: string): Promise<string> {
    return (await this.read(path)).toString();
  }

  /** Make or overwrite it, and the directories above it. Up to 16 MiB; larger ones as an archive. */
  async write(path: string, data: string | Uint8Array, options: { mode?: number } = {}): Promise<void> {
    const content = typeof data === "string" ? Buffer.from(data) : data;
    await this.#transport.bytes({ ...this.#request("PUT", ["content"], { path, mode: options.mode }), content });
  }

  async list(path: string): Promise<FileInfo[]> {
    return (await this.#transport.json<{ items: FileInfo[] }>(this.#request("GET", [], { path }))).items;
  }

  async stat(path: string, options: { follow?: boolean } = {}): Promise<FileInfo> {
    return this.#transport.json(this.#request("GET", ["stat"], { path, follow: options.follow ?? true }));
  }

  /** `target` is the new name itself. */
  async move(source: string, target: string): Promise<void> {
    await this.#transport.bytes({ ...this.#request("POST", ["move"]), body: { source, target } });
  }

  async remove(path: string, options: { recursive?: boolean } = {}): Promise<void> {
    await this.#transport.bytes(this.#request("DELETE", [], { path, recursive: options.recursive ?? false }));
  }

  /** With those above it; no error if it is there. */
  async makeDirectory(path: string): Promise<void> {
    await this.#transport.bytes({ ...this.#request("POST", ["directory"]), body: { path } });
  }

  /** Unpack an uncompressed tar archive into a directory, which is made. */
  async upload(archive: Uint8Array | Readable, directory: string): Promise<void> {
    await this.#transport.bytes({ ...this.#request("PUT", ["archive"], { path: directory }), content: archive });
  }

  /** A directory's contents, or one file, as a tar stream. */
  async download(path: string): Promise<Readable> {
    return this.#transport.open(this.#request("GET", ["archive"], { path }));
  }

  /** What changes in a directory, by looking every `interval` seconds, until you stop iterating. */
  async *watch(path: string, options: { recursive?: boolean; interval?: number } = {}): AsyncGenerator<Change> {
    const source = await this.#transport.open({ ...this.#request("GET", ["watch"], { path, ...options }), events: true });
    try {
      for await (const { name, document } of events(source)) {
        if (name === "added" || name === "changed" || name === "removed") yield { kind: name, path: String(document.path) };
      }
    } finally {
      source.destroy();
    }
  }

  #request(method: Request["method"], parts: string[], query?: Request["query"]): Request {
    return { method, path: this.#path("files", ...parts), ...(query ? { query } : {}) };
  }
}
