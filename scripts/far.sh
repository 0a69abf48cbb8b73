#!/usr/bin/env bash
# Groups far apart (book/src/far.md): two ranks train a Llama of 10.7 million parameters in two network namespaces, with a link of 50 Mbit/s and
# 50 ms each way between them; what `far` sends, how long it takes and where the loss ends, beside data parallelism. Needs what
# scripts/hosts.sh needs, and an idle machine with two cores: scripts/far.sh [PROGRAM]
#
# All runs go on from the checkpoint of WARM steps of `dp=2` (400), for STEPS more with the same rows (400), and average after EVERY (100).
# BATCH rows of 128 bytes are a step (16), and with `delay` groups go on for DELAY steps (5) while sums are on their way. RUNS are those to make,
# of: dp free far bits delay lost. The model can be smaller: LAYERS, HIDDEN, HEADS.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/release/girandole}")
. scripts/hosts/setup.sh
warm=${WARM:-400} steps=${STEPS:-400} every=${EVERY:-100}
export RAYON_NUM_THREADS=1

# The text is this project's sources; some files are kept apart for evaluation.
git ls-files '*.rs' | while read -r file; do echo "$(echo "$file" | md5sum | cut -c1-32) $file"; done | sort | cut -d' ' -f2 > "$dir/files"
head -n 40 "$dir/files" | xargs cat > "$dir/apart.txt"
head -c 65536 "$dir/apart.txt" > "$dir/other.txt"
tail -n +41 "$dir/files" | xargs cat > "$dir/train.txt"
cd "$dir"
needed=$(((warm + steps) * ${BATCH:-16} * 128))
[ "$(stat -c %s train.txt)" -gt "$needed" ] || fail "$needed bytes of text are needed, so that none is there twice: fewer steps, please"

train=("$program" pretrain --data train.txt --evaluate other.txt --layers "${LAYERS:-6}" --hidden "${HIDDEN:-384}" --heads "${HEADS:-6}"
    --length 128 --batch-size "${BATCH:-16}" --lr "${LR:-1e-3}" --warmup 50 --timeout 300)
begin_link

# Starts a rank, the third one in place of one that is lost: start NAME RANK OPTION...
start() {
    local name=$1 rank=$2 netns=$a host=host-a bind=10.77.1.1 later=()
    [ "$name" != lost ] || later=("GIRANDOLE_ELASTIC_FILE=$dir/group")
    [ "$rank" != 2 ] || later+=(GIRANDOLE_NEWCOMER=1)
    [ "$rank" = 0 ] || netns=$b host=host-b bind=10.77.1.2
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=10.77.1.1 MASTER_PORT=29500 GIRANDOLE_BIND=$bind on "$netns" "$host" \
        env "${later[@]}" "${train[@]}" --out "$name/model" --metrics "$name/metrics" --checkpoint-dir "$name/checkpoints" "${@:3}" \
        > "$name/out.$rank" 2> "$name/err.$rank" &
    children+=($!)
    pids+=($!)
}
steps_of() { cat "$1/metrics" 2> /dev/null | grep -c '"event":"step"' || true; }
wait_for_steps() {
    until [ "$(steps_of "$1")" -ge "$2" ]; do
        kill -0 "${pids[0]}" 2> /dev/null || fail "$1: $(cat "$1"/err.*)"
        sleep 0.2
    done
}
# The sum of a field of the steps' metrics: sum_of FIELD NAME
sum_of() { grep -o "\"$1\":[0-9.e-]*" "$2/metrics" | cut -d: -f2 | awk '{ sum += $1 } END { printf "%.1f", sum }'; }
# A run from the checkpoint over the link as it is; says what was sent by each host, the time of the steps, that of communication in it, and the
# loss on the other files: measure NAME OPTION...
measure() {
    local name=$1 before sent pid pids=()
    mkdir -p "$name"
    cp -r warm/checkpoints "$name/checkpoints"
    link bytes
    before=$answer
    for rank in 0 1; do start "$name" "$rank" "${@:2}"; done
    if [ "$name" = lost ]; then
        # The second group is killed after a third of the steps, with its host; the first one goes on. A new one comes after another third.
        wait_for_steps "$name" $((steps / 3))
        for pid in $(ip netns pids "$b"); do kill -9 "$pid" 2> /dev/null || true; done
        wait "${pids[1]}" 2> /dev/null || true
        unset 'pids[1]'
        wait_for_steps "$name" $((2 * steps / 3))
        start "$name" 2 "${@:2}"
    fi
    for pid in "${pids[@]}"; do wait "$pid" || fail "$name: $(cat "$name"/err.*)"; done
    link bytes
    sent=$(echo "$before $answer" | awk '{ printf "%.1f and %.1f MB", ($3 - $1) / 1e6, ($4 - $2) / 1e6 }')
    loss=$(grep '"event":"evaluation"' "$name/metrics" | tail -n 1 | grep -o '"loss":[0-9.]*' | cut -d: -f2)
    echo "$name: $sent sent, $(sum_of seconds "$name") s, $(sum_of communication_seconds "$name") of them in communication, loss $loss"
}
link_is() { link "delay $1"; link "rate $2"; }

on_after=(--steps $((warm + steps)) --schedule cosine --resume)
far=("${on_after[@]}" --mesh far=2 --far-every "$every")
"${train[@]}" --steps "$warm" --schedule constant --mesh dp=2 --out warm/model --checkpoint-dir warm/checkpoints > warm.out 2> warm.err ||
    fail "$(cat warm.err)"
for run in ${RUNS:-dp free far bits lost}; do
    link_is 50 50
    case $run in
        # What data parallelism sends and learns does not depend on the link, and over this one it takes several times as long.
        dp) link_is 0 0; measure dp "${on_after[@]}" --mesh dp=2 ;;
        free) link_is 0 0; measure free "${far[@]}" ;;
        far) measure far "${far[@]}" ;;
        bits) measure bits "${far[@]}" --far-bits 4 ;;
        delay) measure delay "${far[@]}" --far-delay "${DELAY:-5}" ;;
        lost) measure lost "${far[@]}" --elastic 1:2; grep -hE "group 1 of far|has come" lost/err.0 ;;
        *) fail "RUNS: got $run; give some of dp, free, far, bits, delay and lost" ;;
    esac
done
