#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the environment exists" '[ -x env/bin/python ]'
check "greet is in it" 'ls env/lib/python3*/site-packages/greet/__init__.py'
check "it was built" '[ -s var/build ]'
check "the build is right" 'grep -qx "good morning release inside" var/build'
check "it was published" 'cmp var/build var/published'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
