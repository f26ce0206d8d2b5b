#!/bin/bash
cd /app || exit 1

# import
git init -q -b main work && git -C work fast-import --done --quiet <history.fi && git -C work checkout -q -f main

# start
git -C /app/work bisect start main v1

# mark 1
git -C /app/work bisect good

# mark 2
git -C /app/work bisect bad

# mark 3
git -C /app/work bisect good

# mark 4
git -C /app/work bisect bad

# culprit
git -C /app/work rev-parse refs/bisect/bad >/app/var/culprit; git -C /app/work bisect log >/app/var/log

# reset
git -C /app/work bisect reset
