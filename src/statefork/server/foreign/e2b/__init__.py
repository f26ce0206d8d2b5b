"""E2B's control plane and the daemon that it has in each sandbox (envd), so that the `e2b` SDKs work unmodified."""
