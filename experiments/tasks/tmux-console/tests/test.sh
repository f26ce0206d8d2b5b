#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the console was started" 'grep -qx ready var/said'
check "it is unlocked" 'grep -qx unlocked var/said'
check "20 were added" 'grep -qx "value 20" var/said'
check "doubled" 'grep -qx "value 40" var/said'
check "2 were added" 'grep -qx "value 42" var/said'
check "it is saved" '[ "$(cat var/saved)" = 42 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
