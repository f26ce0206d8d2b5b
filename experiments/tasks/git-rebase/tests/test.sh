#!/bin/bash
# Runs beside the agent's shell and changes nothing that it looks at. reward.txt is 1 if every check holds, else 0;
# progress.txt says how many do.
cd /app || exit 1
passed=0 total=0
check() {
  total=$((total + 1))
  if eval "$2" >/dev/null 2>&1; then passed=$((passed + 1)) && echo "ok     $1"; else echo "wrong  $1"; fi
}

check "the repository exists" 'git -C repo rev-parse feature main'
check "feature stands on main" 'git -C repo merge-base --is-ancestor main HEAD'
check "the configuration is merged" '[ "$(cat repo/config.ini)" = "$(printf "name = shop\nport = 8080\nworkers = 4")" ]'
check "the notes are merged" '[ "$(cat repo/notes.txt)" = "$(printf "first\nport 8080\nfour workers")" ]'
check "the rebase is finished" '[ -d repo/.git ] && [ ! -e repo/.git/rebase-merge ] && [ -e repo/README ]'
check "no commit is lost" '[ "$(git -C repo rev-list --count main..feature)" = 3 ] && git -C repo merge-base --is-ancestor main feature'
check "it is tagged" 'git -C repo rev-parse ready && [ "$(git -C repo rev-parse ready)" = "$(git -C repo rev-parse feature)" ]'

mkdir -p /logs/verifier
echo "$passed $total" >/logs/verifier/progress.txt
[ "$passed" = "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
