#!/usr/bin/env bash
# Two hosts: network namespaces with names of their own, two ranks in each, and a link between them that is sound, cut, silent, or slow
# and lossy; a host that freezes, one whose clock jumps, and a disk that is full. Needs root, iproute2, a C compiler and a built
# program: scripts/hosts.sh [PROGRAM]
#
# CUTS=all goes through all seven ways to cut two hosts from each other in an elastic job (about seven minutes), CUTS="drop ..."
# through some of them; unless it is set, through one. Those of a firewall need iptables, and are left out where it is missing.
# FAULTS=all goes through all faults of scripts/hosts/faults.sh (about two minutes), FAULTS="silent ..." through some of them; unless it is
# set, through two. CUTS=none goes through nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debug/girandole}")
. scripts/hosts/setup.sh
. scripts/hosts/faults.sh
dev=gir$$
ip link add "$dev" netns "$a" type veth peer name "$dev" netns "$b"
ip -n "$a" address add 10.77.0.1/24 dev "$dev"
ip -n "$b" address add 10.77.0.2/24 dev "$dev"
for netns in "$a" "$b"; do ip -n "$netns" link set "$dev" up; done

# The same program on both hosts, each started by a launcher: over ADDRESS OUT PROGRAM...
over() {
    local launch=(launch --nnodes 2 --nproc-per-node 2 --master-addr "$1" --master-port 29500 --timeout 60) out=$2
    on "$a" host-a env ${bind_a:+"GIRANDOLE_BIND=$bind_a"} "$program" "${launch[@]}" --node-rank 0 -- "${@:3}" > "$out" 2> "$out.a" &
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

if [ "${CUTS:-}" = none ]; then
    begin_link
    go_through_faults
    exit
fi

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

echo "-- a name with two addresses, of which one leads nowhere"
ip -n "$a" address add 10.88.0.1/32 dev "$dev"
ip -n "$b" route add 10.88.0.1/32 via 10.77.0.9
printf '%s two\n' 10.88.0.1 10.77.0.1 | tee -a "/etc/netns/$a/hosts" >> "/etc/netns/$b/hosts"
over two two "$program" "${train[@]}"
same two
line=$(RANK=1 WORLD_SIZE=2 MASTER_ADDR=two MASTER_PORT=29504 GIRANDOLE_BIND=10.77.0.2 on "$b" host-b \
    "$program" ddp-linear --timeout 8 2>&1 | tail -n 1) || true
for part in "10.77.0.1:29504: Connection refused" "10.88.0.1:29504: "; do
    [[ $line == *"$part"* ]] || fail "each address has its own cause: $line"
done

if command -v iptables > /dev/null; then
    echo "-- a service address, which forwards connections to a host"
    ip -n "$b" route add 10.99.0.1/32 dev "$dev"
    ip netns exec "$b" iptables -t nat -A OUTPUT -d 10.99.0.1 -j DNAT --to-destination 10.77.0.1
    bind_a=10.77.0.1 over 10.99.0.1 service "$program" "${train[@]}"
    same service
fi

echo "-- a host whose loopback interface is down"
ip -n "$a" link set lo down
if line=$(on "$a" host-a "$program" ddp-linear --epochs 1 2>&1); then fail "ranks have met over loopback that is down"; fi
[[ $line == *"the loopback interface is down; bring it up"* ]] || fail "loopback that is down: $line"
ip -n "$a" link set lo up

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

# ---- two halves of an elastic job that cannot reach each other: one goes on, and never both ----
read -r -a cuts <<< "${CUTS:-reset}"
[ "${cuts[*]}" != all ] || cuts=(drop port reset admin host unreachable prohibit)

# Cuts the hosts from each other in this way, on both sides: cut HOW.
cut() {
    local netns other
    for netns in "$a" "$b"; do
        [ "$netns" = "$a" ] && other=10.77.0.2 || other=10.77.0.1
        local input=(ip netns exec "$netns" iptables -A INPUT -s "$other")
        # What the other side's firewall answers comes through: both sides see that they are refused.
        case $1 in
            port | reset | admin | host)
                "${input[@]}" -p icmp -j ACCEPT
                "${input[@]}" -p tcp --tcp-flags RST RST -j ACCEPT
                ;;
        esac
        case $1 in
            drop) "${input[@]}" -j DROP ;;
            port) "${input[@]}" -j REJECT --reject-with icmp-port-unreachable ;;
            reset) "${input[@]}" -p tcp -j REJECT --reject-with tcp-reset ;;
            admin) "${input[@]}" -j REJECT --reject-with icmp-admin-prohibited ;;
            host) "${input[@]}" -j REJECT --reject-with icmp-host-unreachable ;;
            unreachable | prohibit) ip -n "$netns" route add "$1" "$other/32" ;;
            *) fail "CUTS: got $1; give some of drop, port, reset, admin, host, unreachable and prohibit, or all" ;;
        esac
    done
}
mend() {
    local netns other
    for netns in "$a" "$b"; do
        [ "$netns" = "$a" ] && other=10.77.0.2 || other=10.77.0.1
        case $1 in
            unreachable | prohibit) ip -n "$netns" route delete "$1" "$other/32" ;;
            *) ip netns exec "$netns" iptables -F INPUT ;;
        esac
    done
}
cut_steps() { cat cut_metrics 2> /dev/null | grep -c '"step"' || true; }
wait_for_cut_steps() {
    for _ in $(seq 1200); do
        [ "$(cut_steps)" -le "$1" ] || return 0
        sleep 0.05
    done
    fail "the ranks do not train: $(cat cut.*)"
}
# Ranks, each started by itself, so many of them on host A: those of the side GOES (a or b) go on: apart HOW ON_A GOES.
apart() {
    local how=$1 on_a=$2 goes=$3 netns host bind rank side
    ranks=()
    rm -f cut.* cut_metrics
    for rank in 0 1 2 3; do
        [ "$rank" -lt "$on_a" ] && netns=$a host=host-a bind=10.77.0.1 || { netns=$b host=host-b bind=10.77.0.2; }
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29502 GIRANDOLE_BIND=$bind on "$netns" "$host" \
            "$program" ddp-transformer --elastic 1:4 --samples 40 --lr 0.001 --epochs 1000000 --timeout 4 \
            --metrics cut_metrics > /dev/null 2> "cut.$rank" &
        ranks+=($!)
    done
    children+=("${ranks[@]}")
    wait_for_cut_steps 60
    cut "$how"
    for rank in 0 1 2 3; do
        [ "$rank" -lt "$on_a" ] && side=a || side=b
        [ "$side" != "$goes" ] || continue
        if wait "${ranks[rank]}"; then fail "$how: rank $rank is cut off and has ended well: $(cat cut.*)"; fi
        if grep "go on at epoch" "cut.$rank"; then fail "$how: there are two groups: $(cat cut.*)"; fi
    done
    # Those of the other side train on, and the cut does not matter to them any more.
    wait_for_cut_steps "$(cut_steps)"
    grep -q "go on at epoch" cut.* || fail "$how: nobody says that the others go on: $(cat cut.*)"
    for rank in 0 1 2 3; do
        [ "$rank" -lt "$on_a" ] && side=a || side=b
        [ "$side" = "$goes" ] || continue
        kill -0 "${ranks[rank]}" || fail "$how: rank $rank does not go on: $(cat cut.*)"
        kill -9 "${ranks[rank]}"
        wait "${ranks[rank]}" 2> /dev/null || true
    done
    mend "$how"
}
# Two ranks on each host, and a launcher, which vouches for the ranks of its own host and of no other: launched_apart HOW.
launched_apart() {
    local launch=("$program" launch --elastic 1:4 --nnodes 2 --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29503)
    local train=(--timeout 60 -- "$program" ddp-transformer --samples 40 --lr 0.001 --epochs 1000000 --timeout 4
        --metrics cut_metrics)
    rm -f cut.* cut_metrics
    on "$a" host-a "${launch[@]}" --node-rank 0 "${train[@]}" > /dev/null 2> cut.a &
    local first=$!
    on "$b" host-b "${launch[@]}" --node-rank 1 "${train[@]}" > /dev/null 2> cut.b &
    local second=$!
    children+=("$first" "$second")
    wait_for_cut_steps 60
    cut "$1"
    if wait "$second"; then fail "$1: host-b is cut off and has ended well: $(cat cut.b)"; fi
    if grep "go on at epoch" cut.b; then fail "$1: there are two groups: $(cat cut.a cut.b)"; fi
    wait_for_cut_steps "$(cut_steps)"
    grep -q "2 ranks of 4 go on at epoch" cut.a || fail "$1: host-a does not go on: $(cat cut.a)"
    kill -TERM "$first"
    wait "$first" || true
    mend "$1"
}
for how in "${cuts[@]}"; do
    case $how in
        unreachable | prohibit) ;;
        *) command -v iptables > /dev/null || { echo "-- a firewall between halves ($how): left out, there is no iptables"; continue; } ;;
    esac
    echo "-- two halves of an elastic job are cut from each other: $how"
    apart "$how" 2 a
    apart "$how" 1 b
    launched_apart "$how"
done

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

# ---- 50 ms each way, and one packet in a hundred lost ----
echo "-- a slow and lossy link"
begin_link "delay 50" "lose 10"
over 10.77.1.1 slow "$program" "${train[@]}"
same slow
link delay 0
link lose 0

go_through_faults
echo "two hosts: all is well"
