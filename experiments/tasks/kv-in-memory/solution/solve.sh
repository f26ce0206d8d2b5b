#!/bin/bash
cd /app || exit 1

# start
./kv.py >var/log 2>&1 & ./wait-for 7001

# load a
./ask 7001 load spool/a

# load b
./ask 7001 load spool/b

# scale
./ask 7001 scale 3

# drop
./ask 7001 drop obsolete
