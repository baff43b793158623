# Sourced by bin/quickstart and bin/test: the virtual environment of the checkout.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

say() {
    printf '\n== %s\n' "$*"
}

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

is_new_enough() { # PYTHON
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints a Python of version 3.11 or newer: $PYTHON if it is set, else the first that is found on the path.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "expected Python 3.11 or newer in \$PYTHON, found $(python_version "$PYTHON")"
        printf '%s\n' "$PYTHON"
        return
    fi
    local name
    for name in python3.11 python3 python python3.12 python3.13 python3.14; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "expected Python 3.11 or newer on the path, found $(python_version python3);" \
        "install one, or name it: PYTHON=/path/to/python3.11 $0"
}

python_version() { # PYTHON
    if ! command -v "$1" >/dev/null; then
        printf 'no %s' "$1"
    else
        "$1" --version 2>&1 || true
    fi
}

# Makes .venv, unless there is a new enough .venv.
make_venv() {
    if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; then
        return
    fi
    local python
    python=$(find_python) || exit 1
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "$python cannot make a virtual environment;" \
        "on Debian and Ubuntu the package python3-venv is missing"
}

# Installs lowtide, editable, with an extra, if pyproject.toml or constraints.txt has changed since the last time.
install_lowtide() { # EXTRA
    local stamp="$venv/lowtide-$1.stamp" wanted
    wanted=$(cat "$root/pyproject.toml" "$root/bin/constraints.txt")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    say "installing lowtide and its [$1] packages into .venv (the first time this takes minutes: torch is large)"
    rm -f "$stamp"
    cd "$root"
    # pip would compile 20,000 modules. Python compiles the few thousand that are imported, at their first import.
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    if ! "${pip[@]}" -c bin/constraints.txt -e ".[$1]"; then
        printf 'pip found no way to install the versions of bin/constraints.txt with %s; trying those that fit it\n' \
            "$("$venv/bin/python" --version)" >&2
        "${pip[@]}" -e ".[$1]" ||
            fail "pip could not install lowtide; its message stands above"
    fi
    printf '%s\n' "$wanted" >"$stamp"
}
