#!/usr/bin/env bash
# Checks a build with CUDA on a machine with an NVIDIA GPU, and writes a report; see --help. CI has no GPU: there, it runs with
# --rehearse, which goes through all of it on the CPU.
set -uo pipefail

usage() {
    cat <<'HELP'
Usage: gpu-check.sh [--report FILE] [--rehearse] GIRANDOLE

Checks on one NVIDIA GPU what scripts/build-cuda.sh has made: the program GIRANDOLE and, beside it, girandole-conformance
and girandole-operations.
Neither Rust nor CUDA's compiler has to be here, but the driver, cuBLAS, cuRAND and NCCL, which are looked for in
LD_LIBRARY_PATH, beside the program, in /usr/local/cuda, and in the packages of python3.

  --report FILE   where to write what came out (gpu-check.md in this folder)
  --rehearse      the same steps without a GPU: both sides of each comparison are the CPU's

Checked are collectives of CUDA tensors, over NCCL and over TCP with 1 to 4 ranks that share the GPU, and ranks that fail
over NCCL; and, for each experiment and for a Llama in several layouts, that the losses with --device cuda are those with
--device cpu. It takes some minutes. The exit code is 0 if all is as it should be, 1 if not or where there is no GPU.
HELP
}

fail() {
    echo "error: $*" >&2
    exit 1
}

wrong() {
    echo "error: $*; see gpu-check.sh --help" >&2
    exit 2
}

report=gpu-check.md device=cuda program=
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage && exit ;;
        --report) [ -n "${2:-}" ] || wrong "--report: give a file"; report=$2; shift 2 ;;
        --rehearse) device=cpu; shift ;;
        -*) wrong "$1: not an option" ;;
        *) [ -z "$program" ] || wrong "$1: one program is checked at a time"; program=$1; shift ;;
    esac
done
[ -n "$program" ] || wrong "which program?"
[ -x "$program" ] || fail "$program is no program that can be run"
program=$(cd "$(dirname "$program")" && pwd)/$(basename "$program")
conformance=$(dirname "$program")/girandole-conformance
operations=$(dirname "$program")/girandole-operations
work=$(mktemp -d) || fail "there is no place for temporary files"
trap 'rm -rf "$work"' EXIT
failures=0

# ---- libraries and the GPU ----
# Folders in which the libraries often are, where the system does not know them.
library_folders() {
    ls -d /usr/local/cuda/lib64 /usr/local/cuda-13*/lib64 /usr/local/nvidia/lib64 2>/dev/null
    command -v python3 >/dev/null && python3 -c '
import glob, sys
for path in sys.path:
    print(*glob.glob(path + "/nvidia/*/lib"), sep="\n")' 2>/dev/null
}
usable() { timeout 300 "$program" ddp-linear --device "$device" --world-size 1 --epochs 1 --samples 64 >/dev/null 2>"$work/error"; }
# All of it is read: the program would end by SIGPIPE if grep left early.
without_nccl() { timeout 300 "$program" process-groups --backend tcp --world-size 1 2>/dev/null | grep '^NCCL.*missing:.*libnccl' >/dev/null; }
if [ "$device" = cuda ]; then
    # One GPU, in the order in which nvidia-smi lists them.
    export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi
if [ "$device" = cuda ] && { ! usable || without_nccl; }; then
    folders=$(library_folders | grep . | paste -sd:)
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folders
fi
usable || {
    # Where the program itself says nothing, the system's loader or NVIDIA's code may.
    grep '^error:' "$work/error" | tail -n 1 | grep . >&2 || tail -n 5 "$work/error" >&2
    fail "$program cannot use the device"
}
for check in "$conformance" "$operations"; do
    [ "$device" = cpu ] || [ -x "$check" ] || fail "$check is not here: it comes from scripts/build-cuda.sh"
done

# ---- the report ----
: > "$report" || fail "$report cannot be written"
# To the report and to the screen.
say() { printf '%s\n' "$*" | tee -a "$report"; }
now() { date +%s.%N; }
since() { awk -v began="$1" -v now="$(now)" 'BEGIN { printf "%.1f", now - began }'; }
bad() {
    failures=$((failures + 1))
    say "$1"
    shift
    # Why, in its own words, where there are any.
    [ $# = 0 ] || tail -n 12 "$@" 2>/dev/null | sed 's/^/    /' | tee -a "$report"
}

gpu() {
    if [ "$device" = cpu ]; then
        echo "none: this is a rehearsal, in which everything ran on the CPU"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -i "$CUDA_VISIBLE_DEVICES" --query-gpu=name,memory.total,compute_cap,driver_version --format=csv,noheader | head -n 1 |
            sed 's/\(.*\), \(.*\), \(.*\), \(.*\)/\1, \2, compute capability \3, driver \4/'
    else
        grep -h '^Model' /proc/driver/nvidia/gpus/*/information 2>/dev/null | head -n 1 | sed 's/Model: *//'
        head -n 1 /proc/driver/nvidia/version 2>/dev/null
    fi
}

title="A run on a GPU"
[ "$device" = cuda ] || title="A rehearsal without a GPU"
say "# $title"
say ""
say "- date: $(date -u '+%Y-%m-%d %H:%M UTC')"
say "- program: $("$program" --version)"
say "- device: $(gpu | paste -sd' ')"
say "- NCCL: $("$program" process-groups --backend tcp --world-size 1 2>/dev/null | grep '^NCCL')"
say "- host: $(uname -srm), $(nproc) CPUs"
say ""

# ---- operations and collectives ----
conform() {
    local name=$1 began
    shift
    began=$(now)
    if RUST_BACKTRACE=0 timeout 300 "$@" > "$work/log" 2>&1; then
        say "| $name | conforms | $(since "$began") |"
    else
        bad "| $name | **FAILED** | $(since "$began") |" "$work/log"
    fi
}
say "## Operations and collectives of CUDA tensors"
say ""
if [ "$device" = cuda ]; then
    say "| what | result | seconds |"
    say "| --- | --- | --- |"
    conform "operations with gradients, and Adam" "$operations"
    conform "NCCL, 1 rank" "$conformance" nccl 1
    conform "NCCL, 2 ranks on one GPU" "$conformance" shared 2
    conform "NCCL, 4 ranks on one GPU" "$conformance" shared 4
    conform "NCCL, 3 ranks on one GPU of which one fails" "$conformance" shared-faults
    conform "TCP, 2 ranks on one GPU" "$conformance" tcp 2
    conform "TCP, 4 ranks on one GPU" "$conformance" tcp 4
else
    say "Left out in a rehearsal."
fi
say ""

# ---- experiments ----
# The losses of a run's steps, one a line, in their order.
losses() { sed -n 's/.*"event":"step".*"loss":\([^,}]*\).*/\1/p' "$1"; }
seconds() { sed -n 's/.*"event":"summary".*"seconds":\([0-9.eE+-]*\).*/\1/p' "$1" | awk '{ last = $1 } END { printf "%.3f", last }'; }
# The largest difference between two columns, relative to the larger number or 1; nothing where they do not fit together.
difference() {
    awk '
        function size(x) { return x < 0 ? -x : x }
        NF != 2 || $1 $2 ~ /[^-+.0-9eE]/ { exit odd = 1 }
        {
            scale = size($1) > size($2) ? size($1) : size($2)
            apart = size($1 - $2) / (scale > 1 ? scale : 1)
            if (apart > most) most = apart
        }
        END { if (!odd && NR) printf "%.1e", most }'
}
# train KIND RANKS COMMAND OPTIONS...: on `cpu`, or `cuda`, where ranks share the GPU over TCP, or `nccl`, where they share it over NCCL.
train() {
    local kind=$1 ranks=$2
    shift 2
    case $kind in
        # NCCL lets ranks share a GPU if it takes them to be on different hosts.
        nccl)
            NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo timeout 300 "$program" launch --nproc-per-node "$ranks" -- \
                sh -c 'NCCL_HOSTID=host-of-rank-$RANK exec "$@"' rank "$program" "$@" --device cuda --backend nccl
            ;;
        cuda) timeout 300 "$program" "$@" --world-size "$ranks" --device cuda --backend tcp ;;
        cpu) timeout 300 "$program" "$@" --world-size "$ranks" --device cpu ;;
    esac
}
# experiment TOLERANCE RANKS COMMAND OPTIONS...: on the CPU and on the device, with the same seed. With RANKS such as 2-nccl,
# ranks on the device use NCCL.
experiment() {
    local tolerance=$1 ranks=${2%-nccl} name=$3 over=$device side most
    if [ "$2" != "$ranks" ]; then
        [ "$device" = cuda ] || return 0
        over=nccl
    fi
    shift 3
    for side in cpu device; do
        local kind=$over
        [ $side = device ] || kind=cpu
        if ! (cd "$work" && train "$kind" "$ranks" "$name" --metrics "$work/$side.jsonl" "$@" > "$work/log" 2>&1); then
            bad "| $name $* | $ranks, $kind | **FAILED** | | | |" "$work/log"
            return
        fi
        losses "$work/$side.jsonl" > "$work/$side"
    done
    most=$(paste "$work/cpu" "$work/device" | difference)
    local row="$(wc -l < "$work/device") | ${most:-the steps differ} | $tolerance | $(seconds "$work/cpu.jsonl") | $(seconds "$work/device.jsonl") |"
    if [ -n "$most" ] && awk "BEGIN { exit !($most <= $tolerance) }"; then
        say "| $name $* | $ranks, $over | $row"
    else
        bad "| **FAILED** $name $* | $ranks, $over | $row"
    fi
}
# layout TOLERANCE RANKS OPTIONS...: a small Llama.
layout() {
    local tolerance=$1 ranks=$2
    shift 2
    experiment "$tolerance" "$ranks" pretrain --data text --out model --overwrite --steps 4 --layers 4 --hidden 96 --heads 4 --length 64 "$@"
}
say "## Losses, $device against cpu"
say ""
say "The largest difference of a step's loss, relative to it or to 1, and what is allowed: sums are in another order on a GPU,"
say "and in f16 (fsdp-mlp) rounded more. Seconds are those of the training loop alone, on a GPU"
say "with the time to load and, once, to compile its kernels."
say ""
say "| experiment | ranks, over | steps | difference | allowed | seconds, cpu | seconds, $device |"
say "| --- | --- | --- | --- | --- | --- | --- |"
experiment 1e-4 1 ddp-linear --epochs 2 --samples 2000
experiment 1e-4 2 ddp-linear --epochs 2 --samples 2000
experiment 1e-4 2 ddp-trainer --epochs 2
experiment 1e-3 2 ddp-transformer --epochs 20 --dropout 0
experiment 1e-3 1 ddp-mlp --epochs 10
experiment 1e-3 2 ddp-mlp --epochs 10
experiment 1e-3 2 cifar10 --epochs 1 --samples 400 --test-samples 100
experiment 1e-3 2 fsdp-mlp --steps 10 --hidden 512 --param-dtype f32
experiment 2e-2 2 fsdp-mlp --steps 10 --hidden 512
experiment 2e-2 4 fsdp-mlp --steps 5 --hidden 256
experiment 1e-3 2 tensor-parallel-mlp --epochs 1 --hidden-size 256 --samples 64
experiment 1e-3 2 tensor-parallel-transformer --epochs 1 --dropout 0
experiment 1e-3 4 tensor-parallel-transformer --epochs 1 --dropout 0 --tp 2 --sequence-parallel
for schedule in gpipe 1f1b zb-v; do
    experiment 1e-3 2 pipeline-transformer --epochs 3 --dropout 0 --schedule $schedule
done
experiment 1e-3 3-nccl ddp-mlp --epochs 2
experiment 1e-3 2-nccl fsdp-mlp --steps 10 --hidden 512 --param-dtype f32
experiment 1e-3 4-nccl tensor-parallel-transformer --epochs 1 --dropout 0 --tp 2 --sequence-parallel
experiment 1e-3 2-nccl pipeline-transformer --epochs 3 --dropout 0 --schedule zb-v
say ""

# ---- layouts ----
say "## Losses of a Llama, $device against cpu"
say ""
say "| run | ranks, over | steps | difference | allowed | seconds, cpu | seconds, $device |"
say "| --- | --- | --- | --- | --- | --- | --- |"
for number in $(seq 400); do echo "In line $number the number is $number, and its square is $((number * number))."; done > "$work/text"
layout 1e-3 1
layout 1e-3 1 --recompute 1 --accumulate 2
layout 2e-2 1 --parameters bf16
for kind in "" -nccl; do
    for axis in dp shard tp pp; do layout 1e-3 2$kind --mesh $axis=2; done
done
layout 1e-3 4 --mesh shard=2,tp=2
layout 1e-3 4-nccl --mesh pp=2,shard=2
say ""

# ---- timings ----
measure() {
    say '```text'
    timeout 300 "$program" comm-bench --device "$device" --sizes 4K,1M,64M --seconds 0.3 "$@" > "$work/log" 2> "$work/error" ||
        bad "**FAILED** comm-bench $*" "$work/error"
    tee -a "$report" < "$work/log"
    say '```'
    say ""
}
say "## Timings"
say ""
if [ "$device" = cuda ]; then
    say "Over NCCL with one rank; over TCP with two ranks on the one GPU, by way of the host's memory:"
    say ""
    measure --backend nccl --world-size 1 --ops all_reduce
fi
measure --backend tcp --world-size 2 --ops all_reduce

if [ "$failures" = 0 ]; then
    say "Everything is as it should be."
else
    say "**$failures of these failed.**"
fi
echo "the report is in $report"
[ "$failures" = 0 ]
