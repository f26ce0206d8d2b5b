#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the repository exists" 'git -C repo rev-parse v1 main'
check "the bisection was begun" 'cat repo/.git/BISECT_LOG var/log 2>/dev/null | grep -q "bisect start"'
check "it knows the good one" 'cat repo/.git/BISECT_LOG var/log 2>/dev/null | grep -q "^git bisect good $(git -C repo rev-parse main~8)"'
check "it knows the bad one" 'cat repo/.git/BISECT_LOG var/log 2>/dev/null | grep -q "^git bisect bad $(git -C repo rev-parse main~4)"'
check "and the one after" 'cat repo/.git/BISECT_LOG var/log 2>/dev/null | grep -q "^git bisect good $(git -C repo rev-parse main~6)"'
check "the culprit is right" '[ -s var/culprit ] && [ "$(cat var/culprit)" = "$(git -C repo rev-parse main~5)" ]'
check "the bisection is over" '[ -s var/culprit ] && [ ! -e repo/.git/BISECT_LOG ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
