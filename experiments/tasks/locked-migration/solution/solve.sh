#!/bin/bash
cd /app || exit 1

# lock
exec 6>>var/lock; flock -n 6

# fence
fence=$(./fence)

# migrate 1
./migrate 1 "$fence"

# migrate 2
./migrate 2 "$fence"

# verify
./verify "$fence"

# release
flock -u 6; exec 6>&-; touch var/done
