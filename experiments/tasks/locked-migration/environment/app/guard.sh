# Sourced by the tools: the lock must be held, and not by us.
spoil() { echo spoiled >data; echo "$1: the data are spoiled" >&2; exit 1; }
exec 9>>var/lock
flock -n 9 && spoil "the lock is free"
exec 9>&-
