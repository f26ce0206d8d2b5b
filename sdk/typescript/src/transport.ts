/**
 * The way to the daemon: node's own http, because its fetch cannot speak to a unix socket.
 *
 * Sent again is what cannot have been done (no connection, 429) and what is done once however often it is sent (reads, and
 * requests with an idempotency key). What may have been done and cannot be repeated is an UnreachableError.
 */

import { randomUUID } from "node:crypto";
import * as http from "node:http";
import * as https from "node:https";
import type { Readable } from "node:stream";
import { setTimeout as sleep } from "node:timers/promises";
import { errorOf, problemOf, UnreachableError, UsageError } from "./errors.js";

export interface ClientOptions {
  /** `http://` or `https://`; needs a `token`. */
  url?: string;
  /** Instead of a url: a unix socket. Default: the daemon's default, /var/lib/statefork/statefork.sock. */
  socket?: string;
  token?: string;
  /** A certificate (PEM) to trust, for a daemon with its own. */
  ca?: string | Buffer;
  /** How long what can safely be asked again is asked again, through restarts and 429s. 0: never. Default: 30. */
  retrySeconds?: number;
}

export interface Request {
  method: "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
  path: string;
  query?: Record<string, string | number | boolean | string[] | null | undefined>;
  body?: object;
  content?: Uint8Array | Readable;
  /** It makes something: sent with an idempotency key, it is made once however often it is sent. */
  once?: boolean;
  events?: boolean;
  signal?: AbortSignal;
}

const NEVER_SENT = /^(ECONNREFUSED|ENOENT|ENOTFOUND|EAI_AGAIN|EACCES|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH)$|CERT|^ERR_TLS/;
const BROKEN = new RegExp(`${NEVER_SENT.source}|^(ECONNRESET|EPIPE|ERR_STREAM_PREMATURE_CLOSE)$|^HPE_`);
const HOPELESS = /CERT|^ERR_TLS|^EACCES$/;
const MOST_WAIT = 2000;

export class Transport {
  readonly where: string;
  readonly #options: ClientOptions;
  readonly #agent: http.Agent;
  readonly #base: URL;
  #met = false;

  constructor(options: ClientOptions = {}) {
    if (options.url !== undefined && options.socket !== undefined) throw new UsageError("give either url or socket");
    const socket = options.url === undefined ? (options.socket ?? "/var/lib/statefork/statefork.sock") : undefined;
    this.#options = { ...options, ...(socket === undefined ? {} : { socket }) };
    this.#base = new URL(options.url ?? "http://statefork");
    this.where = options.url ?? socket ?? "";
    const kind = this.#base.protocol === "https:" ? https.Agent : http.Agent;
    // `timeout` closes connections that nobody uses, before the daemon does (65 s); one that waits for an answer may wait.
    this.#agent = new kind({ keepAlive: true, keepAliveMsecs: 30_000, timeout: 30_000, ...(options.ca ? { ca: options.ca } : {}) });
  }

  close(): void {
    this.#agent.destroy();
  }

  async json<T>(request: Request): Promise<T> {
    return JSON.parse((await this.bytes(request)).toString()) as T;
  }

  async bytes(request: Request): Promise<Buffer> {
    return this.#patiently(request, async (response) => collect(response));
  }

  /** The answer as it comes in. What breaks while it is read is for the reader. */
  async open(request: Request): Promise<http.IncomingMessage> {
    return this.#patiently(request, async (response) => response);
  }

  /** All items of a list. */
  async pages<T>(path: string, query: Request["query"] = {}): Promise<T[]> {
    const found: T[] = [];
    for (let cursor: string | null = null; ; ) {
      const page: { items: T[]; next_cursor: string | null } = await this.json({
        method: "GET",
        path,
        query: { limit: 1000, ...query, cursor },
      });
      found.push(...page.items);
      cursor = page.next_cursor;
      if (cursor === null) return found;
    }
  }

  async #patiently<T>(request: Request, read: (response: http.IncomingMessage) => Promise<T>): Promise<T> {
    const deadline = Date.now() + (this.#options.retrySeconds ?? 30) * 1000;
    const key = randomUUID();
    let maybeDone = false;
    for (let wait = 50; ; wait = Math.min(wait * 2, MOST_WAIT)) {
      let pause = wait * (0.5 + Math.random() / 2);
      try {
        const response = await this.#send(request, key);
        this.#met = true;
        const status = response.statusCode ?? 0;
        // What is not there any more was removed by the attempt whose answer was lost.
        if (status < 400 || (status === 404 && maybeDone && request.method === "DELETE")) return await read(response);
        const problem = problemOf(status, await collect(response));
        const again = (status === 429 && problem.code !== "too_many_environments") || (status >= 502 && repeatable(request));
        if (!again || Date.now() > deadline) throw errorOf(problem);
        pause = Math.max(pause, Math.min(Number(response.headers["retry-after"] ?? 0), 60) * 1000);
      } catch (error) {
        if (!isBreak(error)) throw error;
        this.#judge(request, error, Date.now() > deadline);
        maybeDone ||= !NEVER_SENT.test(error.code ?? "");
      }
      await sleep(pause, undefined, request.signal ? { signal: request.signal } : {});
    }
  }

  /** Returns if it is worth trying again. A daemon that has answered before is being restarted; another is not there. */
  #judge(request: Request, error: NodeJS.ErrnoException, late: boolean): void {
    const code = error.code ?? "";
    if (NEVER_SENT.test(code)) {
      if (this.#met && !late && !isStream(request.content) && !HOPELESS.test(code)) return;
      throw new UnreachableError(`no daemon answers at ${this.where}: ${error.message}; start one with \`statefork serve\``, error);
    }
    if (repeatable(request) && this.#met && !late) return;
    const what = `${request.method} ${request.path}: the connection to ${this.where} broke (${error.message})`;
    throw new UnreachableError(repeatable(request) ? what : `${what}, and what came of it is not known`, error);
  }

  #send(request: Request, key: string): Promise<http.IncomingMessage> {
    const { content, signal } = request;
    const payload = request.body === undefined ? content : Buffer.from(JSON.stringify(request.body));
    const headers: http.OutgoingHttpHeaders = { accept: request.events ? "text/event-stream" : "*/*" };
    if (this.#options.token) headers.authorization = `Bearer ${this.#options.token}`;
    if (request.once) headers["idempotency-key"] = key;
    if (request.body !== undefined) headers["content-type"] = "application/json";
    if (payload !== undefined && !isStream(payload)) headers["content-length"] = payload.byteLength;
    const secure = this.#base.protocol === "https:";
    return new Promise((resolve, reject) => {
      const sent = (secure ? https : http).request(
        {
          agent: this.#agent,
          method: request.method,
          path: this.#base.pathname.replace(/\/$/, "") + request.path + queryOf(request.query),
          headers,
          ...(signal ? { signal } : {}),
          ...(this.#options.socket ? { socketPath: this.#options.socket } : {}),
          ...(this.#options.socket ? {} : { hostname: this.#base.hostname, port: this.#base.port || (secure ? 443 : 80) }),
        },
        resolve,
      );
      sent.on("error", reject);
      if (isStream(payload)) {
        payload.on("error", (error) => sent.destroy(error));
        payload.pipe(sent);
      } else sent.end(payload);
    });
  }
}

export async function collect(stream: AsyncIterable<Uint8Array>): Promise<Buffer> {
  const pieces: Uint8Array[] = [];
  for await (const piece of stream) pieces.push(piece);
  return Buffer.concat(pieces);
}

export function pathOf(...parts: string[]): string {
  return `/v1/${parts.map(encodeURIComponent).join("/")}`;
}

/** Of the network, not of a program. */
export function isBreak(error: unknown): error is NodeJS.ErrnoException {
  return error instanceof Error && "code" in error && BROKEN.test(String(error.code));
}

function repeatable(request: Request): boolean {
  return !isStream(request.content) && (request.once === true || request.method !== "POST");
}

function isStream(content: unknown): content is Readable {
  return typeof content === "object" && content !== null && "pipe" in content;
}

function queryOf(query: Request["query"] = {}): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) found.append(name, String(one));
  }
  const text = found.toString();
  return text && `?${text}`;
}
