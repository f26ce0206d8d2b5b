#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "it was started" '[ -p var/in ]'
check "orders are fed" '[ ! -e tables/orders ]'
check "customers are fed" '[ ! -e tables/customers ]'
check "it is saved" '[ -s var/out.db ]'
check "the orders are clean" '[ "$(sqlite3 var/out.db "SELECT count(*) FROM orders")" = 4 ]'
check "the report is right" '[ "$(sqlite3 var/out.db "SELECT group_concat(name || total) FROM report")" = ann15,bob25,eve40 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
