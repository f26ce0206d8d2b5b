/** Branchable environments of a StateFork daemon: make one, snapshot it, fork it, keep the best. */

export { Client, Environments, type Filter } from "./client.js";
export { Environment } from "./environment.js";
export {
  AmbiguousError,
  BuildError,
  BusyError,
  DiskFullError,
  ExecTimeoutError,
  ExistsError,
  ForbiddenError,
  HasChildrenError,
  NotCapturableError,
  NotFoundError,
  OverloadedError,
  SessionDeadError,
  StateForkError,
  UnauthenticatedError,
  UnreachableError,
  UnsupportedError,
  UsageError,
  WrongStateError,
} from "./errors.js";
export { type Change, Files } from "./files.js";
export { ExecStream, type Piece } from "./stream.js";
export type { ClientOptions } from "./transport.js";
export type * from "./types.js";
export type { components, operations, paths } from "./openapi.js";
