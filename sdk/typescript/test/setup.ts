import type { TestProject } from "vitest/node";
import { Client } from "../src/index.js";
import { Daemon } from "./daemon.js";

declare module "vitest" {
  export interface ProvidedContext {
    socket: string;
  }
}

/** One daemon for all test files. What a failed test left behind is deleted, and told. */
export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const daemon = new Daemon();
  await daemon.start();
  project.provide("socket", daemon.socket);
  return async () => {
    const client = new Client({ socket: daemon.socket });
    for (const left of await client.environments.list()) {
      console.error(`left behind: ${left.id}`);
      await (await client.environments.get(left.id)).destroy();
    }
    client.close();
    await daemon.stop();
  };
}
