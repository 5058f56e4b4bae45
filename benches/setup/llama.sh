#!/bin/sh
# Builds llama.cpp's benchmarks, once, and prints the folder of their programs.
#
# The source is the one that the Python package llama-cpp-python carries (MIT), compiled for this very processor. All
# lands under the Cargo target directory. A killed run is taken up where it ended; many copies may run at once. With
# LLAMA_BIN_DIR set, that folder is taken as it is.
set -eu

version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
programs='llama-batched-bench llama-bench llama-quantize llama-server'
# What runs beside the compiler; pinned, so that everybody builds alike.
tools='cmake==4.4.5 ninja==1.13.2 scikit-build-core[pyproject]==1.1.2'

fail() {
    printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is missing" "install it, e.g. apt-get install $2"
}

# Which program does the folder $1 lack?
lacking() {
    for program in $programs; do
        [ -x "$1/$program" ] || { echo "$program"; return; }
    done
}

if [ -n "${LLAMA_BIN_DIR:-}" ]; then
    missing=$(lacking "$LLAMA_BIN_DIR")
    [ -z "$missing" ] || fail "LLAMA_BIN_DIR ($LLAMA_BIN_DIR) holds no $missing" "unset it to build one"
    cd "$LLAMA_BIN_DIR" && pwd
    exit 0
fi

need flock util-linux
need sha256sum coreutils

root=$(cd "$(dirname "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
mkdir -p "$target/peers"
peers=$(cd "$target/peers" && pwd)
build=$peers/llama-$version
source=$peers/llama_cpp_python-$version/vendor/llama.cpp

# The kernel drops the lock with the process, however that ends.
exec 9>"$peers/.lock"
flock 9

if [ -e "$build/.done" ] && [ -z "$(lacking "$build/bin")" ]; then
    echo "$build/bin"
    exit 0
fi

need c++ g++
need git git
need python3 python3
python3 -c 'import ensurepip, venv' 2>/dev/null || fail "python3 has no venv" "install it, e.g. apt-get install python3-venv"

# What a killed run left; the lock is ours.
rm -rf "$peers"/.fetch.*
work=$(mktemp -d "$peers/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

venv=$peers/venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" >&2
PATH=$venv/bin:$PATH
export PATH
# shellcheck disable=SC2086 # a list of words
python -m pip install --quiet --disable-pip-version-check $tools >&2 ||
    fail "pip could not install $tools" "check the network and pip's index settings, then run $0 again"

if [ ! -d "$source" ]; then
    echo "fetching llama-cpp-python $version (77 MB)" >&2
    # pip asks the source for its name; the build tools for that are those of the environment.
    python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
        --dest "$work" "llama-cpp-python==$version" >&2 ||
        fail "pip could not download llama-cpp-python $version" "check the network and pip's index settings, then run $0 again"
    archive=$work/llama_cpp_python-$version.tar.gz
    echo "$sha256  $archive" | sha256sum --check --status ||
        fail "the fetched source has a wrong SHA-256" "run $0 again; if it repeats, report it"
    tar -xzf "$archive" -C "$work"
    rm -rf "$peers/llama_cpp_python-$version"
    mv "$work/llama_cpp_python-$version" "$peers/"
fi

echo "building llama.cpp (about 7 minutes on two cores)" >&2
cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF >"$peers/llama.log" 2>&1 ||
    fail "cmake could not configure llama.cpp" "read $peers/llama.log"
# shellcheck disable=SC2086 # a list of words
cmake --build "$build" --target $programs >>"$peers/llama.log" 2>&1 ||
    fail "llama.cpp could not be built" "read $peers/llama.log"
: >"$build/.done"
echo "$build/bin"
