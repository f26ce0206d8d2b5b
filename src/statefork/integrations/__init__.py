"""Environments inside the agent frameworks that people use: one module each, importing its framework and no other.

They hold no state of their own beyond an Environment, which each of them hands out: whatever a framework has no word for
(snapshots, forks, diffs) is asked of that.
"""
