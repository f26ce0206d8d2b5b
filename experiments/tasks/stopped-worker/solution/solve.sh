#!/bin/bash
cd /app || exit 1

# start
./worker.py >var/log 2>&1 & W=$!; for _ in {1..200}; do [ -e var/stage ] && break; sleep 0.05; done

# stop
kill -STOP $W; for _ in {1..100}; do grep -q '^State:.T' /proc/$W/status && break; sleep 0.05; done

# patch
./patch-plan $W

# continue
kill -CONT $W

# go
touch var/go; for _ in {1..200}; do [ "$(cat var/stage)" = 3 ] && break; sleep 0.05; done
