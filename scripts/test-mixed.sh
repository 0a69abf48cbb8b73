#!/usr/bin/env bash
# Runs a job of two ranks whose processors differ (girandole/tests/processors): collectives, copies of a model, layouts.
#
#   scripts/test-mixed.sh          on x86-64: beside this machine's processor, one with AVX2 and one with neither it nor AVX-512
#   scripts/test-mixed.sh --quick  the first of these alone: a minute on 2 cores once the test is built
#   scripts/test-mixed.sh --arm    beside this machine's processor, one of ARM; needs what scripts/test-aarch64.sh needs, but for
#                                  binfmt_misc
#
# The other processor is qemu's: apt-get install qemu-user-static
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1-} in
-h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
    ;;
'' | --quick)
    [ "$(uname -m)" = x86_64 ] || {
        echo "test-mixed: this is not x86-64; see --help" >&2
        exit 2
    }
    ;;
--arm) ;;
*)
    echo "test-mixed: $1 is no option; see --help" >&2
    exit 2
    ;;
esac

emulator() { # PROCESSOR
    command -v "qemu-$1-static" || {
        echo "test-mixed: qemu-$1-static is missing; run: apt-get install qemu-user-static" >&2
        return 1
    }
}
# Builds the test, as `cargo test --workspace` has built it, and prints its path.
program() {
    cargo test --locked --workspace --test processors --no-run --message-format json-render-diagnostics "$@" |
        sed -n 's/.*"name":"processors".*"executable":"\([^"]*\)".*/\1/p'
}
beside() { # COMMAND
    echo "beside $1"
    GIRANDOLE_MIXED=$1 "$own" --test-threads 1
}

own=$(program)
if [ "${1-}" = --arm ]; then
    qemu=$(emulator aarch64)
    target=aarch64-unknown-linux-gnu
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
    other=$(program --target $target)
    QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu} beside "$qemu $other"
else
    qemu=$(emulator x86_64)
    # qemu has no AVX-512.
    beside "$qemu -cpu max $own"
    [ "${1-}" = --quick ] || beside "$qemu -cpu Nehalem $own"
fi
