"""The daemon: the verbs of the library over HTTP."""
