#!/usr/bin/env bash
# Runs the tests on Linux with the ways that macOS takes (`--cfg portable`; what differs is in comm/src/platform,
# launch/src/platform and training/src/platform): shared memory with a name for a moment, sockets with a file, no handles of
# processes, no signal at the parent's death, no files without a name.
#
#   scripts/test-portable.sh            all tests of the workspace: as long as `cargo test --workspace`
#   scripts/test-portable.sh --quick    a part of it, about 5 minutes on 2 cores where the dependencies are built
#   scripts/test-portable.sh ARG...     what `cargo test` is to do, as `-p girandole-launch --test launch`
#
# It builds into the usual target folder, beside what is there: the dependencies are those of any other build, and only the
# workspace's crates are built once more. Afterwards target/debug/girandole is the portable one, until the next `cargo build`.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "$(uname -s)" = Linux ] || {
    echo "test-portable: on this system \`cargo test --workspace\` takes these ways by itself" >&2
    exit 2
}
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/portable-rustc
export RUSTC_WORKSPACE_WRAPPER

case ${1-} in
-h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" ;;
--quick)
    # Ranks by themselves, under a launcher, and one of the README's commands.
    cargo test --locked -p girandole-comm -p girandole-launch --lib --test conformance --test launch
    cargo test --locked -p girandole-training --lib file
    cargo run --locked -p bin -- ddp-linear
    ;;
'') cargo test --workspace --locked ;;
*) cargo test --locked "$@" ;;
esac
