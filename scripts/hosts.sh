#!/usr/bin/env bash
# Two hosts: network namespaces with names of their own, two ranks in each, and a link between them that is sound, cut, or slow
# and lossy. Needs root, iproute2, a C compiler and a built program: scripts/hosts.sh [PROGRAM]
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debug/girandole}")
dir=$(mktemp -d /tmp/girandole-hosts.XXXXXX)
# Names and addresses are of this run alone, and of no network outside.
a=gir-a-$$ b=gir-b-$$ dev=gir$$
children=()

finish() {
    local code=$?
    trap - EXIT
    set +e
    for pid in "${children[@]}"; do kill -9 "$pid" 2>/dev/null; done
    for netns in "$a" "$b"; do
        # Whoever is left there.
        for pid in $(ip netns pids "$netns" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
        ip netns delete "$netns" 2>/dev/null
        rm -rf "/etc/netns/$netns"
    done
    wait 2>/dev/null
    rm -rf "$dir"
    exit "$code"
}
trap finish EXIT

fail() { echo "scripts/hosts.sh: $*" >&2; exit 1; }

# ---- two hosts and a link ----
for netns in "$a" "$b"; do ip netns add "$netns"; ip -n "$netns" link set lo up; done
ip link add "$dev" netns "$a" type veth peer name "$dev" netns "$b"
ip -n "$a" address add 10.77.0.1/24 dev "$dev"
ip -n "$b" address add 10.77.0.2/24 dev "$dev"
for netns in "$a" "$b"; do ip -n "$netns" link set "$dev" up; done
GIRANDOLE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export GIRANDOLE_SECRET

# Runs a command on a host: on NETNS NAME COMMAND...
on() { ip netns exec "$1" unshare --uts sh -c 'hostname "$1"; shift; exec "$@"' sh "$2" "${@:3}"; }

# The same program on both hosts, each started by a launcher: over ADDRESS OUT PROGRAM...
over() {
    local launch=(launch --nnodes 2 --nproc-per-node 2 --master-addr "$1" --master-port 29500 --timeout 60) out=$2
    on "$a" host-a "$program" "${launch[@]}" --node-rank 0 -- "${@:3}" > "$out" 2> "$out.a" &
    local first=$!
    children+=("$first")
    on "$b" host-b "$program" "${launch[@]}" --node-rank 1 -- "${@:3}" > "$out.out-b" 2> "$out.b" || fail "$out, host-b: $(cat "$out.b")"
    wait "$first" || fail "$out, host-a: $(cat "$out.a")"
    [ ! -s "$out.out-b" ] || fail "$out: host-b has printed something"
}

cd "$dir"
train=(ddp-transformer --epochs 3)
"$program" "${train[@]}" --world-size 4 > bare 2> /dev/null
same() { diff "$1" bare || fail "$1 is not what the bare command prints"; }

echo "-- a sound link"
over 10.77.0.1 plain "$program" "${train[@]}"
same plain
echo "-- encrypted"
over 10.77.0.1 encrypted "$program" "${train[@]}" --tls hosts
same encrypted

# ---- a host whose own name is loopback to itself, as on Debian; `ip netns exec` puts this file in the place of /etc/hosts ----
echo "-- names"
mkdir -p "/etc/netns/$a" "/etc/netns/$b"
echo "127.0.1.1 host-a" > "/etc/netns/$a/hosts"
echo "10.77.0.1 host-a" > "/etc/netns/$b/hosts"
named=("$program" launch --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr host-a --timeout 60 -- true)
if line=$(on "$a" host-a "${named[@]}" 2>&1); then fail "launchers have met where no other host comes: $line"; fi
expected="error: --master-addr: got host-a; it is 127.0.1.1 here (/etc/hosts), which no other host reaches; give the address of node 0"
[ "$line" = "$expected" ] || fail "a name that leads to loopback: $line"
echo "10.77.0.1 host-a" >> "/etc/netns/$a/hosts"
over host-a names "$program" "${train[@]}"
same names

# ---- a host that is lost with its launcher: the ranks of the other one go on ----
echo "-- a host that is lost"
elastic=("$program" launch --elastic 2:4 --nnodes 2 --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29500 --timeout 60)
long=("$program" ddp-transformer --samples 40 --lr 0.001 --epochs 300 --metrics elastic.jsonl)
on "$a" host-a "${elastic[@]}" --node-rank 0 -- "${long[@]}" > /dev/null 2> elastic.a &
first=$!
on "$b" host-b "${elastic[@]}" --node-rank 1 -- "${long[@]}" > /dev/null 2> elastic.b &
second=$!
children+=("$first" "$second")
steps() { if [ -e elastic.jsonl ]; then grep -c '"step"' elastic.jsonl || true; else echo 0; fi; }
for _ in $(seq 600); do [ "$(steps)" -ge 60 ] && break; sleep 0.05; done
before=$(steps)
[ "$before" -ge 60 ] || fail "the ranks do not train: $(cat elastic.a elastic.b)"
for pid in $(ip netns pids "$b"); do kill -9 "$pid" 2>/dev/null || true; done
if wait "$second"; then fail "a launcher that was killed has ended well"; fi
wait "$first" || fail "host-a did not go on: $(cat elastic.a)"
grep -q "the others go on, 2 in all" elastic.a || fail "host-a does not say who is left: $(cat elastic.a)"
grep -q "2 ranks of [34] go on at epoch" elastic.a || fail "the ranks do not say that they go on: $(cat elastic.a)"
# By two ranks the rest of the run has more steps than by four; and its loss is lower.
[ "$(steps)" -gt 1500 ] || fail "$(steps) steps in all"
sed -n 's/.*"loss":\([0-9.e-]*\)}.*/\1/p' elastic.jsonl | awk -v before="$before" '
    NR <= before { early += $1 / before } { late[NR % 60] = $1 }
    END { for (at in late) mean += late[at] / 60; exit !(mean < early) }' || fail "the loss has not fallen"

# ---- each byte goes over the link as often as it must ----
echo "-- bytes between hosts"
sent() { on "$1" host cat "/sys/class/net/$dev/statistics/tx_bytes"; }
mebibytes=16
# Each host sends a sum of its own; or half of what is gathered; or sums of the other's half.
for case in all_reduce:2 all_gather:1 reduce_scatter:1; do
    operation=${case%:*} halves=${case#*:}
    before=("$(sent "$a")" "$(sent "$b")")
    # 3 calls come before those that are measured.
    over 10.77.0.1 bytes "$program" comm-bench --ops "$operation" --sizes "${mebibytes}M" --calls 7
    after=("$(sent "$a")" "$(sent "$b")")
    for host in 0 1; do
        went=$((after[host] - before[host])) least=$((10 * halves * mebibytes * 1024 * 1024 / 2))
        [ $((went >= least && went < least + least / 10)) = 1 ] || fail "10 $operation of $mebibytes MiB: host $host has sent $went bytes"
    done
done

# ---- a link that is cut in the middle: each rank names a host that it has lost ----
echo "-- a link that is cut"
timeout_s=5
ranks=()
for rank in 0 1 2 3; do
    [ "$rank" -lt 2 ] && netns=$a host=host-a bind=10.77.0.1 || { netns=$b host=host-b bind=10.77.0.2; }
    RANK=$rank WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29501 GIRANDOLE_BIND=$bind on "$netns" "$host" \
        "$program" ddp-transformer --epochs 1000000 --timeout "$timeout_s" --metrics metrics > /dev/null 2> "cut.$rank" &
    ranks+=($!)
done
children+=("${ranks[@]}")
for _ in $(seq 300); do [ -s metrics ] && break; sleep 0.1; done
[ -s metrics ] || fail "the ranks do not train: $(cat cut.*)"
ip -n "$a" link set "$dev" down
cut_at=$(date +%s%N)
runs() { local pid; for pid in "${ranks[@]}"; do kill -0 "$pid" 2>/dev/null && return 0; done; return 1; }
# A second more, to tell and to end on a machine that is busy.
for _ in $(seq $((20 * timeout_s + 20))); do runs || break; sleep 0.05; done
echo "   all ranks have ended after $((($(date +%s%N) - cut_at) / 1000000)) ms; the time-out is $timeout_s s"
! runs || fail "the link is cut, and a second after the time-out ranks still run: $(cat cut.*)"
for rank in 0 1 2 3; do
    if wait "${ranks[rank]}"; then fail "rank $rank has ended well without the others"; fi
    [ "$rank" -lt 2 ] && gone=host-b || gone=host-a
    grep -q "^rank $rank: error: .*(host $gone)" "cut.$rank" || fail "rank $rank does not name $gone: $(cat "cut.$rank")"
done
ip -n "$a" link set "$dev" up

# ---- 50 ms each way, and one packet in a hundred lost ----
echo "-- a slow and lossy link"
cc -O2 -o slow_link "$OLDPWD/scripts/hosts/slow_link.c"
mkfifo open
./slow_link "$a" "$b" "slow$$" 50 10 < open > said &
children+=($!)
exec 3> open
for _ in $(seq 100); do [ -s said ] && break; sleep 0.1; done
ip -n "$a" address add 10.77.1.1/24 dev "slow$$"
ip -n "$b" address add 10.77.1.2/24 dev "slow$$"
for netns in "$a" "$b"; do ip -n "$netns" link set "slow$$" up; done
over 10.77.1.1 slow "$program" "${train[@]}"
same slow
exec 3>&-
echo "two hosts: all is well"
