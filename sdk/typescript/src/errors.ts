/**
 * One class per meaning, found by the problem's `code`: the same words as in the CLI and the Python library.
 *
 * StateForkError
 * ├── NotFoundError, AmbiguousError, ExistsError, WrongStateError, BusyError, HasChildrenError, UsageError, UnsupportedError,
 * │   SessionDeadError, NotCapturableError, BuildError, DiskFullError
 * ├── ExecTimeoutError      carries the partial `result`
 * ├── UnauthenticatedError, ForbiddenError
 * ├── OverloadedError       429, still so after all retries
 * └── UnreachableError      no daemon answers, or the connection broke and to ask again is not safe
 */

import type { ExecResult, Problem } from "./types.js";

export class StateForkError extends Error {
  /** The word for it: `not_found`, `wrong_state`, ... */
  readonly code: string;
  /** The HTTP status; 0 if there was no answer. */
  readonly status: number;
  /** All that the daemon said about it. */
  readonly problem: Partial<Problem>;

  constructor(message: string, problem: Partial<Problem> = {}, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
    this.problem = problem;
    this.code = problem.code ?? "internal";
    this.status = problem.status ?? 0;
  }
}

export class UsageError extends StateForkError {}
export class NotFoundError extends StateForkError {}
export class AmbiguousError extends StateForkError {}
export class ExistsError extends StateForkError {}
export class WrongStateError extends StateForkError {}
export class BusyError extends StateForkError {}
export class HasChildrenError extends StateForkError {}
export class UnsupportedError extends StateForkError {}
export class SessionDeadError extends StateForkError {}
export class NotCapturableError extends StateForkError {}
export class BuildError extends StateForkError {}
export class DiskFullError extends StateForkError {}
export class UnauthenticatedError extends StateForkError {}
export class ForbiddenError extends StateForkError {}
export class OverloadedError extends StateForkError {}

export class UnreachableError extends StateForkError {
  constructor(message: string, cause?: unknown) {
    super(message, { code: "unreachable" }, { cause });
  }
}

export class ExecTimeoutError extends StateForkError {
  /** What it had printed until then. */
  readonly result: ExecResult;

  constructor(message: string, problem: Partial<Problem>, result: ExecResult) {
    super(message, problem);
    this.result = result;
  }
}

const KINDS: Record<string, new (message: string, problem: Partial<Problem>) => StateForkError> = {
  usage: UsageError,
  not_found: NotFoundError,
  ambiguous: AmbiguousError,
  exists: ExistsError,
  wrong_state: WrongStateError,
  busy: BusyError,
  has_children: HasChildrenError,
  unsupported: UnsupportedError,
  session_dead: SessionDeadError,
  not_capturable: NotCapturableError,
  build: BuildError,
  disk_full: DiskFullError,
  unauthenticated: UnauthenticatedError,
  forbidden: ForbiddenError,
};

/** `output` stands for what came another way: the events of a stream end with a result that has none. */
export function errorOf(problem: Partial<Problem>, output: Partial<ExecResult> = {}): StateForkError {
  const message = problem.detail ?? `HTTP ${problem.status}`;
  if (problem.code === "timeout") {
    return new ExecTimeoutError(message, problem, { ...(problem.result as ExecResult), ...output });
  }
  const kind = problem.status === 429 ? OverloadedError : (KINDS[problem.code ?? ""] ?? StateForkError);
  return new kind(message, problem);
}

/** The problem in an answer, or one made of an answer that is not the daemon's (a proxy's page). */
export function problemOf(status: number, body: Buffer): Partial<Problem> {
  try {
    const document = JSON.parse(body.toString()) as Partial<Problem>;
    if (typeof document.code === "string") return document;
  } catch {
    // not JSON
  }
  const text = body.toString().slice(0, 200);
  return { status, code: "internal", detail: `the answer was HTTP ${status}, not of a StateFork daemon: ${text}` };
}
