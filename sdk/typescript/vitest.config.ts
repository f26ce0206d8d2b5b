import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    globalSetup: "test/setup.ts",
    fileParallelism: false, // one daemon, two cores
    testTimeout: 60_000,
    hookTimeout: 60_000,
  },
});
