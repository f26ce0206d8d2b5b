#!/bin/bash
cd /app || exit 1

# start
mkfifo var/in; python3 -iq <var/in >var/out 2>&1 & exec 7>var/in

# readings
./feed readings >&7

# clean
echo 'clean = [x for x in data if x >= 0]' >&7

# calibration
./feed calibration >&7

# compute
echo 'result = sum(clean) + offset * len(clean)' >&7

# report
echo 'with open("var/new", "w") as file: print(result, file=file)' >&7; echo >&7; echo 'import os; os.rename("var/new", "var/report")' >&7
for _ in {1..100}; do [ -e var/report ] && break; sleep 0.05; done; cat var/report
