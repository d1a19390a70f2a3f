#!/bin/sh
# Makes the virtual environment $1 with the first Python >= 3.12 found: on PATH, among pyenv's
# versions, or installed by uv.
set -eu
venv=$1

is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; then
    exit 0
fi

for candidate in python3 python3.12 python3.13 python3.14 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    path=$(command -v "$candidate" || true)
    if [ -n "$path" ] && is_new_enough "$path"; then
        echo "making $venv with $path"
        exec "$path" -m venv --clear "$venv"
    fi
done

if command -v uv >/dev/null; then
    echo "making $venv with uv"
    exec uv venv --clear --seed --python 3.12 "$venv"
fi

echo "no Python >= 3.12 found: install one (apt install python3.12-venv, pyenv install 3.12) or uv" >&2
exit 1
