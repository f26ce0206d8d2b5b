#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the database exists" '[ -s bank.db ]'
check "slip 1 was taken" '[ -s bank.db ] && [ ! -e slips/1 ]'
check "slip 2 was taken" '[ ! -e slips/2 ] && [ -s bank.db ]'
check "the balances are right" "[ \"\$(sqlite3 bank.db 'SELECT group_concat(balance) FROM accounts ORDER BY name')\" = 380,375,245 ]"
check "the audit is right" "[ \"\$(sqlite3 bank.db 'SELECT * FROM audit')\" = 'batch|1000' ]"

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
