#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the draft was opened" '[ ! -e draft ]'
check "something is written" '[ -s var/final ]'
check "no TODO is left" '[ -s var/final ] && ! grep -q TODO var/final'
check "no colour is left" '[ -s var/final ] && ! grep -q colour var/final'
check "the text is right" '[ "$(cat var/final)" = "$(printf "# colors\nThe color of the sky,\nthe color of color.\n-- the end")" ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
