#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "it was rotated" '[ -e var/rotated ]'
check "there is an archive" '[ -s var/archive ]'
check "its header is right" '[ "$(head -1 var/archive)" = "# log of 2024-02-29" ]'
check "no line is lost" '[ "$(tail -n +2 var/archive)" = "$(seq -f "line %g" 1 40)" ]'
check "the agent is done" '[ -e var/done ] && [ -s var/archive ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
