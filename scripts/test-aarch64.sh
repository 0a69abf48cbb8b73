#!/usr/bin/env bash
# Runs the tests of Linux on ARM (aarch64-unknown-linux-gnu) on another Linux machine, under qemu.
#
#   scripts/test-aarch64.sh            all tests of the workspace; hours on 2 cores
#   scripts/test-aarch64.sh --check    the samplers' tests: what CI does with every change, in less than a minute. The types are those of Linux,
#                                      and for this processor of macOS (scripts/build-macos.sh --check)
#   scripts/test-aarch64.sh --quick    what is most the processor's own: shared memory, sums, the crates' own arithmetic, and
#                                      one of the README's commands; a job of this machine's processor and one of ARM
#   scripts/test-aarch64.sh --documents  the commands that follow the documents, on this machine's processor and on ARM: prints how far
#                                      losses and weights are apart, and fails where a loss is by more than 1e-6
#   scripts/test-aarch64.sh ARG...     what `cargo test` is to do, as `-p girandole-sampler`
#
# Needs Rust's library for that system, a cross compiler, and qemu, which the kernel starts for programs of that processor, so
# that ranks can be started by each other. On Debian:
#   rustup target add aarch64-unknown-linux-gnu
#   apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static binfmt-support
# Where nothing has told the kernel of qemu, as in a container, this script does, if it may.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
missing() {
    echo "test-aarch64: $1 is missing; run: $2" >&2
    exit 1
}
case ${1-} in
-h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
    ;;
esac
[ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || missing "Rust's library for $target" "rustup target add $target"
command -v aarch64-linux-gnu-gcc >/dev/null ||
    missing "the cross compiler" "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
qemu=$(command -v qemu-aarch64-static) || missing "qemu" "apt-get install qemu-user-static"

formats=/proc/sys/fs/binfmt_misc
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats 2>/dev/null || true
if [ "${1-}" = --check ]; then
    # These programs start no others.
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$qemu
elif ! ls $formats/qemu-aarch64* >/dev/null 2>&1; then
    # The head of a program for that processor, which bits of it count, and F: qemu is opened now, whatever root it runs under.
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":qemu-aarch64:M::$magic:$mask:$qemu:F" 2>/dev/null >$formats/register ||
        missing "qemu's entry in binfmt_misc" "apt-get install binfmt-support (as root, on a machine that allows it)"
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
# Where its C library lies.
export QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}
case ${1-} in
--check)
    # Nothing of candle is built for these.
    cargo test --locked --target $target -p girandole-sampler
    ;;
--quick)
    # The schedules of a thousand ranks are integers only, and take a quarter of an hour under qemu.
    cargo test --locked --target $target -p girandole-comm --lib -- shm:: platform:: algorithm:: executor:: engine:: --skip a_thousand_ranks
    cargo test --locked --target $target -p girandole-sampler --lib
    cargo run --locked --target $target -p bin -- ddp-linear
    scripts/test-mixed.sh --arm
    ;;
--documents)
    cargo build --locked --target $target -p bin
    GIRANDOLE_OTHER=$(realpath "${CARGO_TARGET_DIR:-target}/$target/debug/girandole") \
        cargo test --locked -p bin --test program -- processors:: --nocapture
    ;;
'') cargo test --workspace --locked --target $target ;;
*) cargo test --locked --target $target "$@" ;;
esac
