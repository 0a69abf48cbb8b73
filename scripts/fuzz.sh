#!/usr/bin/env bash
# Fuzzes what strangers, other programs, files and the environment may hand us: each target in fuzz/targets for so many seconds,
# from its seeds and from what earlier runs have found. Needs a nightly compiler and `cargo install cargo-fuzz`.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]
#
# Without either, the seeds and changes of them are tested by `cargo test`.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=($(cd targets && basename -s .rs -- *.rs))
# All of our own code but shm/ is safe: what is looked for are panics, overflows, hangs and memory without bounds.
build=(--fuzz-dir . --sanitizer none)

cargo +nightly fuzz build "${build[@]}"
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target"
    echo "== $target"
    # 128 KiB is the longest variable that Linux passes on.
    cargo +nightly fuzz run "${build[@]}" "$target" "corpus/$target" "seeds/$target" -- \
        -max_total_time="$seconds" -max_len=140000 -len_control=200 -timeout=10 -rss_limit_mb=2048 -dict=json.dict -print_final_stats=1
done
