#!/usr/bin/env bash
# Runs what the features `cuda` and `nccl` do on the side of the host, on a machine without a GPU: with stand-ins for NVIDIA's
# libraries, which run kernels and NCCL's calls on the CPU (scripts/cuda-stand-in). Operations with gradients, the conformance suite for NCCL on
# 1 to 4 ranks and for CUDA tensors over TCP on 2 and 4, faults, and experiments. This shows that calls come in order, buffers
# live long enough and errors are named in time. It shows nothing of a GPU: that is scripts/gpu-check.sh's.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/features.sh

scripts/cuda-stand-in/build.sh "$stand_ins"
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

# All at once: what they are built of has the same features then. Nothing is built later, so that scripts/check-mpi.sh can run beside this.
cargo build $selection --bin girandole --test cuda_conformance
built() {
    cargo test $selection "$@" --no-run --message-format json-render-diagnostics | grep -o '"executable":"[^"]*"' | cut -d'"' -f4
}
executables=$(built --lib --test cuda_conformance; built -p girandole-training --features girandole-training/cuda --test cuda)
program=$(grep cuda_conformance <<<"$executables")
(cd comm && "$program")
(cd training && "$(grep '/cuda-[^/]*$' <<<"$executables")")
# What else is behind the feature.
(cd comm && "$(grep '/comm-[^/]*$' <<<"$executables")" nccl::)
# Each piece of work begins late, by up to 2 ms: what waits for nothing reads too early, and what is freed too early is gone.
for ranks in "nccl 3" "tcp 2"; do
    STAND_IN_JITTER=2000 GIRANDOLE_CASE="computing before and after" "$program" $ranks
done
# What the machine lacks for it is one line, and no panic.
said=$(STAND_IN_DEVICES=2 "$program" nccl 3 2>&1) && status=0 || status=$?
[ "$status" = 2 ] && [ "$said" = "error: ${said#error: }" ] && [[ "$said" == *"3 GPUs are needed"* && "$said" != *$'\n'* ]] ||
    { echo "check-nccl: with 2 GPUs for 3 ranks it exits with $status and says: $said" >&2; exit 1; }

# Experiments: the losses of tensors on devices, and the weights saved, are those of the CPU, whether ranks share a device or
# have one each.
girandole=${CARGO_TARGET_DIR:-target}/debug/girandole
mkdir "$TMPDIR/gpus"
touch "$TMPDIR"/gpus/{0,1}
export STAND_IN_GPUS=$TMPDIR/gpus STAND_IN_DEVICES=2
losses() { sed -n 's/.*"event":"step".*"loss":\([^,}]*\).*/\1/p' "$1"; }
# Of a safetensors file: what says where which tensor is, and the numbers.
head_len() { echo $(($(od -An -N8 -t u8 "$1") + 8)); }
heading() { head -c "$(head_len "$1")" "$1"; }
numbers() { tail -c "+$(($(head_len "$1") + 1))" "$1" | od -An -v -w4 -t f4; }
run() {
    local name=$1
    shift
    timeout 300 "$girandole" "$@" --world-size "${world:-2}" --metrics "$TMPDIR/$name" --save "$TMPDIR/$name.safetensors" \
        >/dev/null 2>"$TMPDIR/$name.said" ||
        { tail -n 5 "$TMPDIR/$name.said" >&2; echo "check-nccl: $* fails" >&2; exit 1; }
}
# Over one back end, beside the run on the CPU.
compare_one() {
    local backend=$1
    shift
    run "$backend" "$@" --device cuda --backend "$backend"
    paste <(losses "$TMPDIR/cpu") <(losses "$TMPDIR/$backend") |
        awk 'NF != 2 || ($1 - $2) ^ 2 > 1e-6 * (1 + $1 ^ 2) { exit wrong = 1 } END { exit wrong || !NR }' ||
        { echo "check-nccl: $* has other losses over $backend than on the CPU" >&2; exit 1; }
    # Adam makes a step of full length of any gradient, however small.
    cmp <(heading "$TMPDIR/cpu.safetensors") <(heading "$TMPDIR/$backend.safetensors") &&
        paste <(numbers "$TMPDIR/cpu.safetensors") <(numbers "$TMPDIR/$backend.safetensors") |
        awk 'NF != 2 { exit wrong = 1 } { far += ($1 - $2) ^ 2 > 1e-6 * (1 + $1 ^ 2) } END { exit wrong || !NR || far * 1000 > NR }' ||
        { echo "check-nccl: $* saves other weights over $backend than on the CPU" >&2; exit 1; }
    echo "$backend, ${world:-2} ranks: $*: the losses and the weights of the CPU"
}
# Over several back ends, at once.
compare() {
    local backend backends=$1 running=()
    shift
    run cpu "$@" --device cpu
    for backend in $backends; do
        compare_one "$backend" "$@" &
        running+=($!)
    done
    for backend in "${running[@]}"; do wait "$backend"; done
}
both="tcp nccl"
compare "$both" ddp-linear --epochs 1 --samples 1000
compare "$both" ddp-trainer --epochs 1
compare "$both" ddp-transformer --epochs 2 --dropout 0
compare "$both" ddp-mlp --epochs 2
compare "$both" cifar10 --epochs 1 --samples 40 --test-samples 8
compare "$both" cifar10 --epochs 1 --samples 40 --test-samples 8 --num-workers 2 --pin-memory
compare "$both" fsdp-mlp --steps 3 --hidden 64 --param-dtype f32
compare "$both" tensor-parallel-mlp --epochs 1 --hidden-size 64 --samples 16
handbook=(--epochs 1 --samples 16 --vocab-size 32 --d-model 16 --num-heads 2 --length 9)
compare "$both" tensor-parallel-transformer "${handbook[@]}"
compare "$both" tensor-parallel-transformer "${handbook[@]}" --tp 2 --sequence-parallel
compare "$both" pipeline-transformer --epochs 1 --dropout 0
for schedule in 1f1b interleaved-1f1b looped-bfs zb-h1 zb-v; do
    compare "$both" pipeline-transformer --epochs 1 --dropout 0 --schedule $schedule --micro-batches 4 --batch-size 16 \
        --samples 32 --d-model 64 --num-layers 4
done
world=4 compare tcp fsdp-mlp --steps 3 --hidden 64 --param-dtype f32 --sharding hybrid-shard --shard-ranks 2

# The process that starts the ranks leaves the devices to them, where it trains nothing itself.
mkdir "$TMPDIR/exclusive"
export STAND_IN_EXCLUSIVE=$TMPDIR/exclusive
compare auto ddp-trainer --epochs 1
compare auto fsdp-mlp --steps 3 --hidden 64 --param-dtype f32
unset STAND_IN_EXCLUSIVE
