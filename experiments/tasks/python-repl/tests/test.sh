#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the interpreter was started" '[ -p var/in ]'
check "the readings were fed" '[ -p var/in ] && [ ! -e data/readings ]'
check "the calibration was fed" '[ -p var/in ] && [ ! -e data/calibration ]'
check "no traceback" '[ -e var/out ] && ! grep -q Traceback var/out'
check "the report is right" '[ "$(cat var/report)" = 105 ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
