"""The only room that makes syscalls or starts programs: mounts, namespaces, cgroups, criu, probes."""
