#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the token was issued" '[ -s var/fence ]'
check "the data are not spoiled" '! grep -q spoiled data'
check "step 1" 'grep -qE "version [12]" data'
check "step 2" 'grep -qx "version 2" data'
check "it is verified" 'grep -qx "version 2" var/verified'
check "the lock is released" '[ -e var/done ] && flock -n var/lock true'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
