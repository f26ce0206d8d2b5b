#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the voucher is used" '[ ! -e vouchers/today ]'
check "the ledger is written" '[ -s var/ledger ]'
check "it has the voucher" 'grep -qx "voucher V-2024-118" var/ledger'
check "rent" '[ $(grep -cx "rent 700" var/ledger) = 1 ]'
check "food" 'grep -qx "food 250" var/ledger'
check "travel" 'grep -qx "travel 90" var/ledger'
check "the sum is right" 'grep -qx "sum 1040" var/ledger'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
