/** A command's output while it runs: server-sent events, gone on with after a broken connection. */

import { setTimeout as sleep } from "node:timers/promises";
import { errorOf, type StateForkError, UnreachableError } from "./errors.js";
import { isBreak, type Request, type Transport } from "./transport.js";
import type { ExecResult, Problem } from "./types.js";

export interface Piece {
  stream: "stdout" | "stderr";
  data: Buffer;
}

const MOST_KEPT = 16 << 20;

type Event = { name: string; document: Record<string, unknown> };

/** Bytes in any pieces become events. */
export async function* events(source: AsyncIterable<Uint8Array>): AsyncGenerator<Event> {
  let rest = "";
  const decoder = new TextDecoder();
  for await (const bytes of source) {
    const blocks = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const fields = new Map(block.split("\n").map((line) => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
      const name = fields.get("event");
      if (name !== undefined) yield { name, document: JSON.parse(fields.get("data") ?? "{}") };
    }
  }
}

/**
 * Iterate over its pieces, or await its result, or both. It runs from the moment it is made. Who stops iterating leaves it
 * running; `command` is the id to come back with (`env.attach`).
 */
export class ExecStream implements AsyncIterable<Piece> {
  /** The command's id, once it is known. */
  command: string | undefined;
  readonly #transport: Transport;
  readonly #first: Request;
  readonly #commands: string;
  readonly #retrySeconds: number;
  readonly #pieces: AsyncGenerator<Piece>;
  readonly #begun: Promise<AsyncIterable<Uint8Array>>;
  readonly #seen = { stdout: 0, stderr: 0 };
  readonly #kept: Piece[] = [];
  #keptBytes = 0;
  #gap = false;
  #ended: ExecResult | undefined;
  #error: unknown;

  constructor(transport: Transport, first: Request, commands: string, retrySeconds = 30) {
    this.#transport = transport;
    this.#first = { ...first, events: true };
    this.#commands = commands;
    this.#retrySeconds = retrySeconds;
    this.#begun = transport.open(this.#first);
    this.#begun.catch(() => undefined); // told to whoever iterates
    this.#pieces = this.#follow();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Piece> {
    // Not `for await`: leaving that would end the generator for those who come later, too.
    for (let next = await this.#next(); !next.done; next = await this.#next()) yield next.value;
  }

  /** Waits for the end; what was not iterated over is not told any more. The result has all of it, up to 16 MiB. */
  async result(): Promise<ExecResult> {
    for (let next = await this.#next(); !next.done; next = await this.#next());
    return this.#ended as ExecResult;
  }

  async #next(): Promise<IteratorResult<Piece>> {
    const next = await this.#pieces.next();
    if (next.done && this.#error !== undefined) throw this.#error;
    return next;
  }

  async *#follow(): AsyncGenerator<Piece> {
    let source = this.#begun;
    let deadline = 0;
    for (let wait = 50; ; wait = Math.min(wait * 2, 2000)) {
      try {
        for await (const piece of this.#read(await source)) {
          deadline = 0;
          wait = 50;
          yield piece;
        }
        if (this.#ended || this.#error) return;
      } catch (error) {
        if (!isBreak(error)) {
          this.#error = error;
          return;
        }
      }
      deadline ||= Date.now() + this.#retrySeconds * 1000;
      if (this.command === undefined || Date.now() > deadline) {
        this.#error = new UnreachableError(`the stream from ${this.#transport.where} broke; what came of the command is not known`);
        return;
      }
      await sleep(wait);
      source = this.#transport.open({
        method: "GET",
        path: `${this.#commands}/${this.command}/output`,
        query: { stdout_offset: this.#seen.stdout, stderr_offset: this.#seen.stderr },
        events: true,
      });
    }
  }

  async *#read(source: AsyncIterable<Uint8Array>): AsyncGenerator<Piece> {
    for await (const { name, document } of events(source)) {
      if (name === "stdout" || name === "stderr") {
        const data = Buffer.from(String(document.data), "base64");
        const offset = Number(document.offset);
        this.#gap ||= offset > this.#seen[name];
        this.#seen[name] = offset + data.length;
        this.#keep({ stream: name, data });
        yield { stream: name, data };
      } else if (name === "started") this.command = String(document.command);
      else if (name === "exit") this.#ended = { ...(document as ExecResult), ...this.#output() };
      else if (name === "problem") this.#error = errorOf(document as Partial<Problem>, this.#output()) satisfies StateForkError;
    }
  }

  #keep(piece: Piece): void {
    this.#keptBytes += piece.data.length;
    if (this.#keptBytes <= MOST_KEPT) this.#kept.push(piece);
    else this.#gap = true;
  }

  #output(): Pick<ExecResult, "stdout" | "stderr" | "output" | "encoding" | "truncated"> {
    const text = (wanted?: string) =>
      Buffer.concat(this.#kept.filter((piece) => !wanted || piece.stream === wanted).map((piece) => piece.data)).toString();
    return { stdout: text("stdout"), stderr: text("stderr"), output: text(), encoding: "utf-8", truncated: this.#gap };
  }
}
