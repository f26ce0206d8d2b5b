"""StateFork as tools for a model (Model Context Protocol). The verbs are the daemon's; this room writes them for a reader who
pays for every word: short answers, the rest in pages, and descriptions that say when to use what."""
