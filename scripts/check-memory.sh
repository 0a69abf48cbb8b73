#!/usr/bin/env bash
# Runs the tests of `fsdp`, whose tensors lose and regain their storage, under valgrind: no invalid read or write may be found.
#   scripts/check-memory.sh [TEST...]     without names, every test file of fsdp/tests: about 3 minutes
# Needs valgrind (Debian: apt install valgrind).
set -euo pipefail
cd "$(dirname "$0")/.."

command -v valgrind >/dev/null || {
    echo "check-memory: valgrind is not installed; install it (Debian: apt install valgrind), then run this again" >&2
    exit 1
}
names=("$@")
if [ ${#names[@]} = 0 ]; then
    for file in fsdp/tests/*.rs; do names+=("$(basename "$file" .rs)"); done
fi
tests=()
for name in "${names[@]}"; do
    [ -f "fsdp/tests/$name.rs" ] || {
        echo "check-memory: there is no fsdp/tests/$name.rs; give names of files in fsdp/tests without .rs" >&2
        exit 2
    }
    tests+=(--test "$name")
done
host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
# Threads that spin would starve each other where valgrind lets one run at a time, and is not told to be fair.
export "CARGO_TARGET_${host}_RUNNER=valgrind --quiet --fair-sched=yes --error-exitcode=9"
# The whole workspace's features, so that nothing is built twice. A test file of this name in another crate runs, too.
cargo test --workspace --locked "${tests[@]}" -- --test-threads 1
