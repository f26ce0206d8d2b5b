#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the licence was checked out" '[ -s var/licence ]'
check "the sources were generated" 'grep -q 44 gen/table.c'
check "the objects are there" '[ -s gen/table.o ] && [ -s main.o ]'
check "it is linked" '[ "$(./program)" = "sum 110" ]'
check "the package has the program's output" 'grep -qx "sum 110" var/package'
check "the package has the licence" 'grep -qx "licence $(cat var/licence)" var/package'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
