#!/usr/bin/env bash
# Make .frameworks: a virtualenv with this project and the agent frameworks that tests/integrations runs (scripts/frameworks.txt).
# They need Python 3.12, which is more than the project itself asks for: without one nothing is made, and those tests skip and say so.
# A second run finds everything there and ends at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'frameworks: %s\n' "$*" >&2; }

retried() {
    local attempt
    for attempt in 1 2 3; do
        "$@" && return 0
        say "failed (attempt $attempt of 3): $*"
        sleep $((attempt * 3))
    done
    return 1
}

# Some frameworks have no packages for the newest Python yet, so the one that the pins were made with is asked for first.
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in "${FRAMEWORKS_PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python python3 /usr/bin/python3; do
        if [ -n "$candidate" ] && fits "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

install_packages() {
    # uv is several times quicker than pip; where its own way to the packages is closed, pip may still have one.
    .frameworks/bin/uv pip install --quiet --python .frameworks/bin/python --requirement scripts/frameworks.txt \
        || .frameworks/bin/python -m pip install --quiet --retries 5 --requirement scripts/frameworks.txt
}

install_project() {
    .frameworks/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
}

stamp=$(cat scripts/frameworks.txt scripts/frameworks.sh | sha256sum)
project=$(sha256sum <pyproject.toml)  # entry points are in it
if [ "$(cat .frameworks/.packages 2>/dev/null)" != "$stamp" ]; then
    if ! .frameworks/bin/python -m pip --version >/dev/null 2>&1 || ! fits .frameworks/bin/python; then
        if ! python=$(find_python); then
            say "no Python 3.12 or 3.13 found, so the agent frameworks are not installed and their tests will skip; name one: FRAMEWORKS_PYTHON=/path/to/python $0"
            exit 0
        fi
        rm -rf .frameworks
        say "making .frameworks with $("$python" --version)"
        "$python" -m venv .frameworks
    fi
    rm -f .frameworks/.packages
    retried .frameworks/bin/python -m pip install --quiet --retries 5 uv
    say "installing $(grep -c == scripts/frameworks.txt) packages"
    retried install_packages
    # Importing one of them reads thousands of files: compiled once here, or at every start where PYTHONDONTWRITEBYTECODE is set.
    .frameworks/bin/python -m compileall -q -j 0 .frameworks/lib >/dev/null || true
    printf '%s\n' "$stamp" >.frameworks/.packages
fi
if [ "$(cat .frameworks/.project 2>/dev/null)" != "$project" ]; then
    retried install_project
    printf '%s\n' "$project" >.frameworks/.project
fi
