#!/bin/bash
cd /app || exit 1

# start
tmux -L app new-session -d -s console ./console.py; for _ in {1..200}; do [ -s var/said ] && break; sleep 0.05; done; cat var/said

# unlock
./say "unlock $(./pin now)"

# add 20
./say 'add 20'

# double
./say double

# add 2
./say 'add 2'

# save
./say save
