#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the daemon runs" './ask 7014 ping'
check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "share 1 is in" '[ $(./ask 7014 shares) -ge 1 ]'
check "share 2 is in" '[ $(./ask 7014 shares) -ge 2 ]'
check "it is unsealed" '[ $(./ask 7014 shares) = 3 ]'
check "the signature is published" '[ -s var/published ] && [ $(./ask 7014 sign artifact) = $(cat var/published) ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
