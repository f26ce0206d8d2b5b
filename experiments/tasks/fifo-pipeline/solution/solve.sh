#!/bin/bash
cd /app || exit 1

# fifos
mkfifo var/in var/mid

# start
./filter.py & ./count.py & exec 7>var/in

# one
./batch one >&7; for _ in {1..100}; do [ "$(cat var/seen 2>/dev/null)" = 2 ] && break; sleep 0.05; done

# two
./batch two >&7; for _ in {1..100}; do [ "$(cat var/seen 2>/dev/null)" = 4 ] && break; sleep 0.05; done

# three
./batch three >&7; for _ in {1..100}; do [ "$(cat var/seen 2>/dev/null)" = 5 ] && break; sleep 0.05; done

# flush
echo flush >&7; for _ in {1..100}; do [ -s var/total ] && break; sleep 0.05; done
