#!/usr/bin/env bash
# Runs the README's own program as a new user would: by itself, and under `girandole launch`; and builds the guide where mdbook is
# installed. What the guide's blocks say is tested by `cargo test -p bin --test guide` and the doc tests.
#
#   scripts/check-guide.sh
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

expect() { # FILE PATTERN COUNT
    local found
    found=$(grep -c "$2" "$1" || true)
    if [ "$found" != "$3" ]; then
        printf 'error: %s lines with %s in place of %s:\n' "$found" "$2" "$3" >&2
        cat "$1" >&2
        exit 1
    fi
}

cargo build --locked --quiet -p bin --bin girandole --example own_program
programs=${CARGO_TARGET_DIR:-target}/debug

# Both ranks have learnt the line.
"$programs/examples/own_program" >"$folder/alone"
expect "$folder/alone" '^rank [01]: step 300, loss 0\.00' 2
"$programs/girandole" launch --nproc-per-node 3 -- "$programs/examples/own_program" >"$folder/launched"
expect "$folder/launched" '^rank [012]: step 300, loss ' 3

# The README's first commands, in a folder that has what they name. Its second block is what they print.
root=$PWD
mkdir -p "$folder/readme/target" && ln -s "$root/book" "$root/CONTRIBUTING.md" "$folder/readme"
awk '/^```console$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' README.md |
    sed "s|cargo run -p bin --|\"$(realpath "$programs")/girandole\"|" >"$folder/first.sh"
(cd "$folder/readme" && bash -euo pipefail "$folder/first.sh") >"$folder/first"
expect "$folder/first" '^step 500/500: loss 2\.' 1
expect "$folder/first" '^The ranks ' 1
grep -q '<svg' "$folder/readme/target/run.html"

if command -v mdbook >/dev/null; then
    mdbook build --dest-dir "$folder/book" book >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
    expect "$folder/log" 'WARN\|ERROR' 0
else
    echo "mdbook is not installed here: the guide is not built"
fi
