#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the service runs" './ask 7007 ping'
check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "the operator has logged in" '[ -e var/login ]'
check "it is configured" 'grep -qx limit=50 service.conf'
check "the limit is in force" '[ $(./ask 7007 limit) = 50 ]'
check "the grant is committed" '[ $(./ask 7007 grants) = alice:50 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
