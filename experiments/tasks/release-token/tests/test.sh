#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the token was issued" '[ -s var/issued ]'
check "the release is not locked" '[ ! -e var/locked ]'
check "the image was built for its region" 'grep -qx "image for eu-north-2" var/image'
check "it was pushed" 'cmp var/image var/pushed'
check "it is live" 'grep -qx "image for eu-north-2 is live in eu-north-2" var/promoted'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
