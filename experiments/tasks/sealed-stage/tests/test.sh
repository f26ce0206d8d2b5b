#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the stage is made" '[ -d stage ]'
check "sealed there" 'grep -qx "cwd /app/stage" var/seal'
check "the umask" 'grep -qx "umask 0027" var/seal'
check "the limit" 'grep -qx "files 256" var/seal'
check "the epoch" 'grep -qx "epoch 1700000000" var/seal'
check "confirmed" '[ -e var/confirmed ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
