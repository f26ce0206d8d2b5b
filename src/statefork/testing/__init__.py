"""Suites that any backend can run: import them, hand over a way to make environments, read the verdicts."""
