// The same sources twice: ES modules and CommonJS, each with its types. A package.json tells Node which is which.
import { execFileSync } from "node:child_process";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
const sources = ["--noEmit", "false", "--declaration", "--rootDir", "src", "--target", "ES2022"];
const kinds = {
  esm: ["--module", "NodeNext", "--moduleResolution", "NodeNext"],
  cjs: ["--module", "CommonJS", "--moduleResolution", "Node10"],
};

rmSync("dist", { recursive: true, force: true });
for (const [kind, options] of Object.entries(kinds)) {
  mkdirSync(`dist/${kind}`, { recursive: true });
  execFileSync(process.execPath, [tsc, "-p", "tsconfig.build.json", ...sources, ...options, "--outDir", `dist/${kind}`], {
    stdio: "inherit",
  });
  const type = kind === "esm" ? "module" : "commonjs";
  writeFileSync(`dist/${kind}/package.json`, `${JSON.stringify({ type })}\n`);
}
