#!/usr/bin/env bash
# Builds stripped programs that start without installing anything, and their checksums: target/dist/.
#
#   scripts/release.sh                             for all three systems
#   scripts/release.sh x86_64-unknown-linux-gnu    for these only
#
# x86_64-unknown-linux-gnu and aarch64-unknown-linux-gnu need glibc 2.17 (2012) or later; aarch64-apple-darwin is macOS on Apple
# silicon. The one for x86-64 finds out when it starts whether the processor has AVX-512, AVX2 or neither.
# Needs Rust's library for each system, and zig, which has C compilers, linkers and headers:
#   rustup target add x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu aarch64-apple-darwin
#   pip install ziglang cargo-zigbuild
set -euo pipefail
cd "$(dirname "$0")/.."

known='x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu aarch64-apple-darwin'
glibc=2.17
case ${1-} in
-h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
    ;;
esac
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $known
for target in "$@"; do
    case " $known " in
    *" $target "*) ;;
    *)
        echo "release: there is no program for $target, but for: $known" >&2
        exit 2
        ;;
    esac
    [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ] || {
        echo "release: Rust's library for $target is missing; run: rustup target add $target" >&2
        exit 1
    }
done
command -v cargo-zigbuild >/dev/null || {
    echo "release: cargo-zigbuild is missing; run: pip install ziglang cargo-zigbuild" >&2
    exit 1
}

folder=${CARGO_TARGET_DIR:-target}
dist=$folder/dist
version=$(cargo metadata --no-deps --format-version 1 --locked | sed -n 's/.*"name":"bin","version":"\([^"]*\)".*/\1/p')
mkdir -p "$dist"
for target in "$@"; do
    case $target in *linux*) with_glibc=$target.$glibc ;; *) with_glibc=$target ;; esac
    cargo-zigbuild zigbuild -p bin --release --locked --target "$with_glibc" --config 'profile.release.strip="symbols"'
    name=girandole-$version-$target
    cp "$folder/$target/release/girandole" "$dist/$name"
    case $target in
    *linux*)
        # No newer function of glibc is asked for.
        newest=$(grep -aoE 'GLIBC_2\.[0-9]+(\.[0-9]+)?' "$dist/$name" | sed 's/GLIBC_//' | sort -uV | tail -1)
        [ "$(printf '%s\n%s\n' "$newest" $glibc | sort -V | tail -1)" = $glibc ] || {
            echo "release: $dist/$name needs glibc $newest" >&2
            exit 1
        }
        ;;
    esac
    # Where this machine can run it, it starts, and trains.
    case $target in
    "$(rustc -vV | sed -n 's/^host: //p')") env -i "$dist/$name" ddp-linear --world-size 2 >/dev/null ;;
    esac
    # A checksum for each, of earlier ones as well.
    (cd "$dist" && sha256sum "$name" >"$name.sha256")
    ls -l "$dist/$name"
done
