#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the broker runs" './ask 7024 ping'
check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "night is done" '[ ! -e batches/night ] && [ $(./ask 7024 count) -ge 3 ]'
check "urgent is submitted" '[ ! -e batches/urgent ]'
check "urgent is done" '[ $(./ask 7024 count) = 6 ]'
check "one worker runs" '[ $(pgrep -fc "^/usr/bin/python3 ..worker.py") = 1 ]'
check "the results are right" 'grep -qx "3 8 15 1200 1000 600" var/results'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
