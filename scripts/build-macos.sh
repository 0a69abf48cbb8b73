#!/usr/bin/env bash
# Builds the program for macOS on Apple silicon, on Linux: target/aarch64-apple-darwin/release/girandole.
#
#   scripts/build-macos.sh            the program
#   scripts/build-macos.sh --check    types only, of the whole workspace with its tests and the feature `metal`; no warning passes
#
# Needs Rust's library for that system, and zig, which has a C compiler, a linker and Apple's headers:
#   rustup target add aarch64-apple-darwin
#   pip install ziglang cargo-zigbuild
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-apple-darwin
case ${1-} in
-h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
    ;;
'' | --check) ;;
*)
    echo "build-macos: $1 is no option; see --help" >&2
    exit 2
    ;;
esac
[ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || {
    echo "build-macos: Rust's library for $target is missing; run: rustup target add $target" >&2
    exit 1
}
command -v cargo-zigbuild >/dev/null || {
    echo "build-macos: cargo-zigbuild is missing; run: pip install ziglang cargo-zigbuild" >&2
    exit 1
}

if [ "${1-}" = --check ]; then
    RUSTFLAGS="-D warnings" cargo-zigbuild check --workspace --all-targets --locked --target $target \
        --features girandole/metal,bin/metal
    exit
fi
cargo-zigbuild zigbuild -p bin --release --locked --target $target
program=${CARGO_TARGET_DIR:-target}/$target/release/girandole
# The first bytes of a 64-bit Mach-O file.
[ "$(head -c 4 "$program" | od -An -tx1 | tr -d ' ')" = cffaedfe ] || {
    echo "build-macos: $program is no program for macOS" >&2
    exit 1
}
ls -l "$program"
