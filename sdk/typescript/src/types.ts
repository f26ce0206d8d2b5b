/** The API's own documents, by short names. They keep the API's spelling: what you read in docs/api.md is what you write. */

import type { components } from "./openapi.js";

type Schemas = components["schemas"];

export type EnvironmentInfo = Schemas["Environment"];
export type CreateEnvironment = Schemas["CreateEnvironment"];
export type PatchEnvironment = Schemas["PatchEnvironment"];
export type ExecResult = Schemas["ExecResult"];
export type CommandInfo = Schemas["Command"];
export type Snapshot = Schemas["Snapshot"];
export type SnapshotDetail = Schemas["SnapshotDetail"];
export type PatchSnapshot = Schemas["PatchSnapshot"];
export type Tree = Schemas["Tree"];
export type Restored = Schemas["Restored"];
export type ForkError = Schemas["ForkError"];
export type Diff = Schemas["Diff"];
export type Usage = Schemas["Usage"];
export type Operation = Schemas["Operation"];
export type FileInfo = Schemas["FileInfo"];
export type Backend = Schemas["Backend"];
export type Problem = Schemas["Problem"] & Record<string, unknown>;

type Data = string | Uint8Array;
type Shared = "command" | "command_base64" | "argv" | "stdin" | "stdin_base64" | "background" | "interactive" | "encoding";

/** `stdin` may be bytes; the output is text unless `encoding` is `base64`. */
export type ExecOptions = Omit<Schemas["Exec"], Shared> & { stdin?: Data; encoding?: ExecResult["encoding"] };
export type RunOptions = Omit<Schemas["Run"], Shared> & { stdin?: Data; encoding?: ExecResult["encoding"] };
export type StreamOptions = Pick<ExecOptions, "timeout" | "stdin">;
export type ForkOptions = Omit<Schemas["Fork"], "n" | "return_errors">;
export type SnapshotOptions = Omit<Schemas["CreateSnapshot"], "name">;
