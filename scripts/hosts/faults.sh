# Faults of what is between two hosts, and of the hosts: what is said of each, and when. Read by scripts/hosts.sh, on the link that
# setup.sh begins: `go_through_faults` goes through those of FAULTS.

all_faults=(cut silent there back frozen late left_behind clock disk)

# Four ranks, each started by itself, train on the link until they are stopped, with this time-out: begin_ranks TIMEOUT_S [OPTION]...
begin_ranks() {
    local rank netns host bind
    ranks=()
    rm -f rank.* metrics
    for rank in 0 1 2 3; do
        [ "$rank" -lt 2 ] && netns=$a host=host-a bind=10.77.1.1 || { netns=$b host=host-b bind=10.77.1.2; }
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=10.77.1.1 MASTER_PORT=29501 GIRANDOLE_BIND=$bind on "$netns" "$host" \
            "$program" ddp-transformer --epochs 1000000 --timeout "$1" --metrics metrics "${@:2}" > /dev/null 2> "rank.$rank" &
        ranks+=($!)
    done
    children+=("${ranks[@]}")
    for _ in $(seq 300); do [ -s metrics ] && break; sleep 0.1; done
    [ -s metrics ] || fail "the ranks do not train: $(cat rank.*)"
}
# Whether one of these processes runs.
runs() { local pid; for pid in "$@"; do kill -0 "$pid" 2> /dev/null && return 0; done; return 1; }
# Waits until these processes have ended, which takes so many seconds at most: end_within SECONDS PID...
end_within() {
    local began
    began=$(date +%s%N)
    for _ in $(seq $((20 * $1))); do runs "${@:2}" || break; sleep 0.05; done
    ! runs "${@:2}" || fail "after $1 s there are still ranks: $(cat rank.*)"
    echo "   ended after $((($(date +%s%N) - began) / 1000000)) ms; $1 s are promised"
}
# Ranks that have ended must have failed, and name the other host: must_name HOST RANK...
must_name() {
    local rank
    for rank in "${@:2}"; do
        if wait "${ranks[rank]}"; then fail "rank $rank has ended well without the others"; fi
        grep -q "^rank $rank: error: .*(host $1)" "rank.$rank" || fail "rank $rank does not name $1: $(cat rank.*)"
    done
}
# The link is broken and nobody is told: by the time-out, and a second more to tell and to end on a busy machine, each rank names a host
# that it has lost. break_link HOW COMMAND...
break_link() {
    echo "-- a link that $1"
    begin_ranks 5
    "${@:2}"
    end_within 6 "${ranks[@]}"
    must_name host-b 0 1
    must_name host-a 2 3
}
fault_cut() {
    break_link "is cut" ip -n "$a" link set "link$$" down
    ip -n "$a" link set "link$$" up
}
fault_silent() {
    break_link "goes silent without a reset" link lose 1000
    link lose 0
}
fault_there() {
    break_link "loses all that host-a sends" link lose 1000 there
    link lose 0
}
fault_back() {
    break_link "loses all that host-b sends" link lose 1000 back
    link lose 0
}

# Stops or continues all processes of host B: signal_host SIGNAL
signal_host() {
    local pid
    for pid in $(ip netns pids "$b"); do kill "-$1" "$pid" 2> /dev/null || true; done
}
steps_of() { grep -c '"step"' metrics || true; }

# A job of many steps over the link, which is at work when this returns: begin_job NAME OPTION..., and with commands before the program in `before`.
begin_job() {
    local name=$1 ranks=("${before[@]}" "$program" ddp-transformer --epochs 300)
    [ -s long ] || "$program" ddp-transformer --epochs 300 --world-size 4 > long 2> /dev/null
    rm -f metrics
    over 10.77.1.1 "$name" "${ranks[@]}" --metrics "$dir/metrics" "${@:2}" &
    job=$!
    children+=("$job")
    for _ in $(seq 300); do [ -s metrics ] && break; sleep 0.05; done
}
# It ends well, with the result of a run without faults: end_job NAME
end_job() {
    wait "$job" || fail "$1: the job has not gone on"
    diff "$1" long || fail "$1 is not what the bare command prints"
}
still_at_work() { kill -0 "$job" 2> /dev/null || fail "the job is over before the fault"; }

# For 20 s nothing of a host runs, and the ranks wait for 60: they go on as if nothing had been, and the result is the same.
fault_frozen() {
    echo "-- a host that freezes for 20 s, while ranks wait for longer"
    local job before=()
    begin_job frozen --timeout 60
    signal_host STOP
    sleep 20
    still_at_work
    signal_host CONT
    end_job frozen
}
# The ranks wait for 5 s: the others name the host within them, and its own ranks end once they run again, as they are told why.
fault_late() {
    echo "-- a host that freezes for 20 s, while ranks wait for 5"
    begin_ranks 5
    signal_host STOP
    local began=$SECONDS
    end_within 6 "${ranks[@]:0:2}"
    must_name host-b 0 1
    sleep $((began + 20 - SECONDS))
    signal_host CONT
    end_within 3 "${ranks[@]:2:2}"
    must_name host-b 2 3
}

# As before, in an elastic job: the ranks of the other host go on, and those that were left behind end when they wake.
fault_left_behind() {
    echo "-- a host of an elastic job that freezes for 20 s, while ranks wait for 5"
    local launch=("$program" launch --elastic 2:4 --nnodes 2 --nproc-per-node 2 --master-addr 10.77.1.1 --master-port 29503 --timeout 60)
    local train=("$program" ddp-transformer --samples 40 --lr 0.001 --epochs 1000000 --timeout 5 --metrics metrics) began first second at
    rm -f metrics
    on "$a" host-a "${launch[@]}" --node-rank 0 -- "${train[@]}" > /dev/null 2> behind.a &
    first=$!
    on "$b" host-b "${launch[@]}" --node-rank 1 -- "${train[@]}" > /dev/null 2> behind.b &
    second=$!
    children+=("$first" "$second")
    for _ in $(seq 300); do [ -s metrics ] && break; sleep 0.1; done
    signal_host STOP
    began=$SECONDS
    sleep 8
    grep -q "2 ranks of 4 go on at epoch" behind.a || fail "host-a does not go on: $(cat behind.*)"
    grep -q "(host host-b)" behind.a || fail "host-a does not name host-b: $(cat behind.a)"
    sleep $((began + 20 - SECONDS))
    signal_host CONT
    at=$(steps_of)
    sleep 3
    for pid in $(ip netns pids "$b"); do
        ! grep -qz "^RANK=" "/proc/$pid/environ" || fail "3 s after it has woken, host-b still has a rank: $(cat behind.*)"
    done
    [ "$(steps_of)" -gt "$at" ] || fail "host-a has stopped: $(cat behind.*)"
    # The launchers themselves.
    pkill -TERM -P "$first"
    wait "$first" "$second" || true
}
# The wall clock of all ranks is a year ahead while they train, and then twenty years behind: nobody minds.
fault_clock() {
    echo "-- a clock that jumps"
    local year job before=(env "LD_PRELOAD=$dir/clock.so" "CLOCK_AHEAD=$dir/ahead")
    cc -O2 -shared -fPIC -o clock.so "$scripts/hosts/clock.c" -ldl
    echo 0 > ahead
    year=$("${before[@]}" date +%Y)
    begin_job clock --tls hosts --checkpoint-dir "$dir/checkpoints" --checkpoint-every 10
    echo $((366 * 86400)) > ahead
    [ "$("${before[@]}" date +%Y)" -gt "$year" ] || fail "the clock does not jump"
    sleep 0.5
    echo $((-20 * 366 * 86400)) > ahead
    still_at_work
    end_job clock
    rm -rf checkpoints
}

# A disk is full when the second checkpoint is written: each rank ends, long before the time-out, and says which file had no place on it, or that
# another one has said so. With more space the job goes on from the first checkpoint.
fault_disk() {
    echo "-- a disk that fills while a checkpoint is written"
    local began=$SECONDS
    local small=(--layers 2 --hidden 32 --heads 4 --length 16 --batch-size 8 --steps 30 --lr 0.01)
    local train=("$program" pretrain --data text --out model --mesh dp=2,shard=2 "${small[@]}" --timeout 300
        --checkpoint-dir "$dir/disk/checkpoints" --checkpoint-every 10)
    mkdir -p disk
    mount -t tmpfs -o size=700k girandole disk
    seq 3000 > text
    if (over 10.77.1.1 full "${train[@]}") 2> said; then fail "a checkpoint is written on a disk that is full"; fi
    [ $((SECONDS - began)) -lt 150 ] || fail "the job has not ended when the disk was full: $(cat said)"
    grep -q "cannot write .*/disk/checkpoints/.*: No space left on device" said || fail "which file is it? $(cat said)"
    mount -o remount,size=64m disk
    over 10.77.1.1 full "${train[@]}" --resume
    grep -q "going on after step 10" full.a || fail "the job does not go on from the first checkpoint: $(cat full.a)"
    umount disk
}

go_through_faults() {
    local faults fault
    read -r -a faults <<< "${FAULTS:-silent there}"
    [ "${faults[*]}" != all ] || faults=("${all_faults[@]}")
    for fault in "${faults[@]}"; do
        [[ " ${all_faults[*]} " == *" $fault "* ]] || fail "FAULTS: got $fault; give some of ${all_faults[*]}, or all"
        "fault_$fault"
    done
}
