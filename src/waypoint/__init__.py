"""Waypoint: live sessions whose files, processes, memory and terminal can be snapshotted, restored and forked."""

__version__ = "0.1.0"
