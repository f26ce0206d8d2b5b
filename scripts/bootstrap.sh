#!/usr/bin/env bash
# Make .venv with Waypoint and the development tools in it. The Makefile calls this when its stamp is older than pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'setup: %s\n' "$*" >&2; }

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        # Being on PATH is not enough: a version manager's shim may stand for a version that is not selected.
        if [ -n "$candidate" ] && fits "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    say "no Python 3.11 or later found; install one (apt-get install python3) or name it: make setup PYTHON=/path/to/python"
    return 1
}

install_package() {
    local attempt
    export DEBIAN_FRONTEND=noninteractive
    [ "$(id -u)" -eq 0 ] || { say "run: sudo apt-get install $1"; return 1; }
    for attempt in 1 2 3; do
        # The lists of a fresh machine are empty, those of an old one name files that are gone: read them when it fails.
        apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$1" >&2 && return 0
        say "installing $1 failed (attempt $attempt of 3); reading the package lists again"
        apt-get -q -o Acquire::Retries=3 update >&2 || true
    done
    return 1
}

make_venv() {
    local python version
    if [ -x .venv/bin/python ] && fits .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    python=$(find_python)
    rm -rf .venv
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        # Debian splits venv off; the package is named after the interpreter's version.
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        install_package "python$version-venv"
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
}

install_python_packages() {
    local attempt
    # pip reads dependency groups only since 25.1, and 3.11 comes with an older one.
    .venv/bin/python - >.venv/dev.txt <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file).get("dependency-groups", {}).get("dev", [])))
PYTHON
    for attempt in 1 2 3; do
        if .venv/bin/python -m pip install --quiet --retries 5 --editable '.[server,mcp,otel,bench]' --requirement .venv/dev.txt; then
            return 0
        fi
        say "pip failed (attempt $attempt of 3)"
        sleep $((attempt * 3))
    done
    say "the Python packages could not be installed; see pip's words above"
    return 1
}

make_venv
install_python_packages
