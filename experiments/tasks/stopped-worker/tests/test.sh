#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "stage 1" '[ $(cat var/stage) -ge 1 ]'
check "the plan is patched" '[ -e var/patched ] && grep -qx "factor 9" plan'
check "the plan is not spoiled" '[ ! -e var/spoiled ]'
check "stage 3" '[ $(cat var/stage) = 3 ]'
check "the result is right" '[ $(cat var/result) = 162 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
