#!/bin/sh
# Makes the Python environment of the end-to-end tests, once, and prints the path of its python.
#
# It lies under the Cargo target directory and holds exactly what python.lock beside this script names. A changed lock
# makes it anew. Many copies of this script may run at once.
set -eu

fail() {
    printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is missing" "install it, e.g. apt-get install $2"
}

need flock util-linux
need python3 python3

here=$(cd "$(dirname "$0")" && pwd)
lock=$here/python.lock
target=${CARGO_TARGET_DIR:-$here/../../target}
mkdir -p "$target"
venv=$(cd "$target" && pwd)/python

# The kernel drops the lock with the process, however that ends.
exec 9>"$venv.lock"
flock 9

# The copy of the lock is written last: where it is whole and equal, so is the environment.
if ! cmp -s "$lock" "$venv/installed.lock"; then
    echo "making the Python environment of the tests" >&2
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || fail "python3 cannot make a virtual environment" "install it, e.g. apt-get install python3-venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --requirement "$lock" >&2 ||
        fail "pip could not install what $lock names" "check the network and pip's index settings, then run $0 again"
    cp "$lock" "$venv/installed.lock"
fi
echo "$venv/bin/python"
