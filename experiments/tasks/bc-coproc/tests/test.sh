#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "ticket a is used" '[ ! -e tickets/a ]'
check "ticket b is used" '[ ! -e tickets/b ]'
check "ticket c is used" '[ ! -e tickets/c ]'
check "the answer is handed in" '[ -s var/answer ]'
check "the answer is right" '[ "$(cat var/answer)" = 9449772114106 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
