#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "redis runs" '[ "$(redis-cli -p 7015 ping)" = PONG ]'
check "it was started once" '[ $(wc -l <var/starts) = 1 ]'
check "the orders are imported" '[ ! -e orders ]'
check "the ranking is right" '[ "$(redis-cli -p 7015 zrange ranking 0 -1 withscores | xargs)" = "ann 55 bob 65 eve 85" ]'
check "the list is deleted" '[ "$(redis-cli -p 7015 exists ranking)" = 1 ] && [ "$(redis-cli -p 7015 exists orders)" = 0 ]'
check "the winner is right" '[ "$(redis-cli -p 7015 get winner)" = eve ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
