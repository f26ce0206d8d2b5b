#!/bin/bash
cd /app || exit 1

# start
./service.py >var/log 2>&1 & ./wait-for 7007

# login
session=$(./ask 7007 login operator)

# configure
sed -i 's/^limit=.*/limit=50/' service.conf

# reload
kill -HUP "$(cat var/pid)"; for _ in {1..100}; do [ "$(./ask 7007 limit)" = 50 ] && break; sleep 0.05; done

# grant
./ask 7007 grant "$session" alice

# commit
./ask 7007 commit "$session"
