"""StateFork: one interface over branchable environments."""
