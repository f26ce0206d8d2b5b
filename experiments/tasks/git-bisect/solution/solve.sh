#!/bin/bash
cd /app || exit 1

# import
git init -q -b main repo && git -C repo fast-import --done --quiet <history.fi && git -C repo checkout -q -f main

# start
git -C /app/repo bisect start main v1

# mark 1
git -C /app/repo bisect good

# mark 2
git -C /app/repo bisect bad

# mark 3
git -C /app/repo bisect good

# mark 4
git -C /app/repo bisect bad

# culprit
git -C /app/repo rev-parse refs/bisect/bad >/app/var/culprit; git -C /app/repo bisect log >/app/var/log

# reset
git -C /app/repo bisect reset
