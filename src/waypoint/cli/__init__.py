"""The `waypoint` command: one file per command. Data on stdout, messages on stderr."""
