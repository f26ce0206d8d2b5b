#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the debugger was started" '[ -p var/in ] && grep -q Pdb var/out'
check "there is a breakpoint" 'grep -q "Breakpoint 1 at" var/out'
check "the program has begun" '[ -p var/in ] && [ ! -e items ]'
check "there is an invoice" '[ -s var/invoice ]'
check "the invoice is right" '[ "$(cat var/invoice)" = 150 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
