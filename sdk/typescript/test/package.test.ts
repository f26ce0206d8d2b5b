import { execFileSync, spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import ts from "typescript";
import { expect, inject, test } from "vitest";

const here = join(import.meta.dirname ?? ".", "..");

test("the generated types are those of the OpenAPI document", () => {
  const program = join(here, "node_modules/openapi-typescript/bin/cli.js");
  const argv = [program, "../../docs/openapi.json", "--default-non-nullable", "false"];
  const fresh = execFileSync(process.execPath, argv, { cwd: here, stdio: ["ignore", "pipe", "ignore"], maxBuffer: 1 << 26 });
  expect(readFileSync(join(here, "src/openapi.ts"), "utf-8"), "run: npm run generate").toBe(fresh.toString());
});

test("it can be imported and required, and needs nothing at run time", async () => {
  const described = JSON.parse(readFileSync(join(here, "package.json"), "utf-8"));
  expect(described.dependencies).toBeUndefined();
  const required = createRequire(import.meta.url)(join(here, described.exports["."].require.default));
  expect(typeof required.Client).toBe("function");
  const script = `
    import { Client, NotFoundError } from ${JSON.stringify(join(here, described.exports["."].import.default))};
    const client = new Client({ socket: ${JSON.stringify(inject("socket"))} });
    await client.environments.get("e-none").catch((error) => console.log(error instanceof NotFoundError, error.code));
    client.close();
  `;
  const said = execFileSync(process.execPath, ["--input-type=module", "--eval", script]);
  expect(said.toString()).toBe("true not_found\n");
});

const examples = ["README.md", "../../docs/sdk-typescript.md"].flatMap((name) =>
  [...readFileSync(join(here, name), "utf-8").matchAll(/```ts\n(.*?)```/gs)].map((found) => found[1] ?? ""),
);

test.each(examples.map((example, number) => ({ number, example })))("example $number of the documentation runs", ({ number, example }) => {
  const text = example.replaceAll("/var/lib/statefork/statefork.sock", inject("socket"));
  expect(text).not.toBe(example);
  const options = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext };
  // Below the package, so that `import "statefork"` finds what was built.
  const program = join(here, `dist/example-${number}.mjs`);
  writeFileSync(program, ts.transpileModule(text, { compilerOptions: options }).outputText);
  const done = spawnSync(process.execPath, [program], { encoding: "utf-8" });
  expect(done.stderr).toBe("");
  expect(done.status).toBe(0);
  expect(done.stdout).not.toBe("");
});
