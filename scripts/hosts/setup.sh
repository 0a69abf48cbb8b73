# Two hosts for a script that reads this: network namespaces `$a` and `$b` with names and addresses of their own, a folder `$dir`, and what
# removes all of it at the end. Needs root and iproute2.

scripts=$PWD/scripts
dir=$(mktemp -d /tmp/girandole-hosts.XXXXXX)
# Jobs are killed here together with whoever would clean up after them.
export TMPDIR=$dir
# Names and addresses are of this run alone, and of no network outside.
a=gir-a-$$ b=gir-b-$$
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
    if mountpoint -q "$dir/disk"; then umount "$dir/disk"; fi
    rm -rf "$dir"
    exit "$code"
}
trap finish EXIT

fail() { echo "$0: $*" >&2; exit 1; }

for netns in "$a" "$b"; do ip netns add "$netns"; ip -n "$netns" link set lo up; done
GIRANDOLE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export GIRANDOLE_SECRET

# Runs a command on a host: on NETNS NAME COMMAND...
on() { ip netns exec "$1" unshare --uts sh -c 'hostname "$1"; shift; exec "$@"' sh "$2" "${@:3}"; }

# A link between the hosts that does what it is told (scripts/hosts/link.c), beside any other one: they are 10.77.1.1 and 10.77.1.2 on it.
# begin_link COMMAND...
begin_link() {
    local ready netns
    cc -O2 -o "$dir/link" "$scripts/hosts/link.c"
    coproc link { exec "$dir/link" "$a" "$b" "link$$" "$@"; }
    # It ends with this script; nothing is said of how.
    disown "$link_PID"
    exec {to_link}>&"${link[1]}" {from_link}<&"${link[0]}"
    read -r -u "$from_link" ready && [ "$ready" = ready ] || fail "there is no link"
    ip -n "$a" address add 10.77.1.1/24 dev "link$$"
    ip -n "$b" address add 10.77.1.2/24 dev "link$$"
    for netns in "$a" "$b"; do ip -n "$netns" link set "link$$" up; done
}
# Tells the link something, and leaves what it answers in `answer`: link COMMAND
link() {
    echo "$*" >&"$to_link"
    read -r -u "$from_link" answer || fail "the link has ended"
    [ "$answer" != "what?" ] || fail "the link does not know: $*"
}
