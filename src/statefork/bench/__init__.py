"""The benchmark: the same work on every backend of this host, in one run, judged by one clock."""
