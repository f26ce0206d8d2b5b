#!/bin/sh
# A service that works through twelve jobs and logs what happens. Every third job fails twice before it succeeds.
#
#   service.sh DIRECTORY ATTEMPTS    gives a job up after so many attempts
for job in 1 2 3 4 5 6 7 8 9 10 11 12; do
  attempt=1
  while [ $((job % 3)) = 0 ] && [ "$attempt" -le 2 ] && [ "$attempt" -le "$2" ]; do
    echo "error job $job, attempt $attempt"
    attempt=$((attempt + 1))
  done
  [ "$attempt" -gt "$2" ] || echo "done job $job"
done >"$1/in"
