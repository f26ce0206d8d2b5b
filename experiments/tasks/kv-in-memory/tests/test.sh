#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the server runs" './ask 7001 ping'
check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "spool/a was loaded" './ask 7001 get beta'
check "spool/b was loaded" './ask 7001 get gamma'
check "scaled by 3" '[ $(./ask 7001 get alpha) = 30 ]'
check "everything was there when it was scaled" '[ $(./ask 7001 get delta) = 120 ]'
check "the sum is right" '[ $(./ask 7001 sum) = 300 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
