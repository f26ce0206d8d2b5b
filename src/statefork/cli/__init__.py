"""The `statefork` command: one file per command. The only room that prints, and that reads environment variables."""
