#!/usr/bin/env bash
# The commands under a real Slurm: two virtual nodes on loopback, started here and ended when this ends. Needs root,
# slurm-wlm, munge and openmpi-bin (Debian's names), and a built program: scripts/slurm.sh [PROGRAM]
set -euo pipefail
cd "$(dirname "$0")/.."

program=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debug/girandole}")
dir=$(mktemp -d /tmp/girandole-slurm.XXXXXX)
chmod 755 "$dir"
port=${SLURM_TEST_PORT:-16820}
daemons=()

finish() {
    local code=$?
    trap - EXIT
    set +e
    scancel --user root 2>/dev/null
    # Munge last: the others need it to take their leave.
    for ((at = ${#daemons[@]} - 1; at >= 0; at--)); do
        kill "${daemons[at]}" 2>/dev/null
        wait "${daemons[at]}" 2>/dev/null
    done
    # Whatever else has the name of this configuration in its environment.
    for process in /proc/[0-9]*; do
        local pid=${process#/proc/}
        [ "$pid" != $$ ] && [ "$pid" != "$BASHPID" ] || continue
        { tr '\0' '\n' < "$process/environ"; } 2>/dev/null | grep -qx "SLURM_CONF=$dir/slurm.conf" && kill -9 "$pid"
    done
    [ "$code" = 0 ] || tail -n 20 "$dir"/*.log 2>/dev/null || true
    rm -rf "$dir"
    exit "$code"
}
trap finish EXIT

fail() { echo "scripts/slurm.sh: $*" >&2; exit 1; }

# ---- the cluster ----
install -d -o munge -m 700 "$dir/key"
install -d -o munge -m 755 "$dir/munge"
head -c 1024 /dev/urandom > "$dir/key/key"
chown munge "$dir/key/key"
chmod 400 "$dir/key/key"
mkdir "$dir/state" "$dir/spool-n0" "$dir/spool-n1" "$dir/work"
cat > "$dir/slurm.conf" <<CONF
ClusterName=virtual
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=8 RealMemory=100 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
export SLURM_CONF=$dir/slurm.conf

# It becomes a process of its own; the file tells which.
runuser -u munge -- /usr/sbin/munged --key-file="$dir/key/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/munge/pid" --log-file="$dir/munge/munged.log" --seed-file="$dir/munge/seed"
daemons+=("$(cat "$dir/munge/pid")")
slurmctld -D > /dev/null 2>&1 & daemons+=($!)
for node in n0 n1; do slurmd -D -N $node > /dev/null 2>&1 & daemons+=($!); done
# Nothing here takes nearly as long as these limits.
for _ in $(seq 300); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && break; sleep 0.1; done
[ "$(sinfo -h -t idle -o %D)" = 2 ] || fail "the nodes are not ready: $(sinfo 2>&1)"

step() { echo "-- $*" >&2; timeout 120 "$@"; }
train=(ddp-transformer --epochs 3)
cd "$dir/work"
"$program" "${train[@]}" --world-size 4 > bare 2> /dev/null
same() { diff "$1" bare || fail "$1 is not what the bare command prints"; }

# ---- the same lines, whoever starts the ranks ----
step srun -N2 -n4 "$program" "${train[@]}" > srun
same srun
step srun --mpi=pmi2 -N2 -n4 "$program" "${train[@]}" > pmi2
same pmi2
# Two nodes of one host share what this plugin keeps for a host.
if srun --mpi=list 2>&1 | grep -w pmix >/dev/null; then
    step srun --mpi=pmix -N1 -n4 "$program" "${train[@]}" > pmix
    same pmix
fi
step mpirun --allow-run-as-root --oversubscribe -n 4 "$program" "${train[@]}" > mpirun
same mpirun

# ---- the job file that users copy ----
job="$OLDPWD/deploy/slurm/ddp-transformer.sbatch"
GIRANDOLE=$program step sbatch -W -o batch.out "$job" --epochs 3
grep -v -e '^note: ' -e '^warning: ' batch.out > batch
same batch
[ -z "$(ls -A | grep girandole-secret || true)" ] || fail "the job's secret is left"
ls checkpoints-*/latest > /dev/null

# ---- the same job file, cancelled ----
cancelled=$(GIRANDOLE=$program sbatch --parsable -o cancelled.out "$job" --epochs 1000000)
for _ in $(seq 600); do [ -e "checkpoints-$cancelled/latest" ] && break; sleep 0.1; done
[ -e "checkpoints-$cancelled/latest" ] || fail "the job keeps no checkpoint: $(cat cancelled.out)"
[ -e ".girandole-secret-$cancelled" ] || fail "the job has no secret"
scancel "$cancelled"
for _ in $(seq 600); do [ -z "$(squeue -h -j "$cancelled" 2> /dev/null)" ] && break; sleep 0.1; done
[ -z "$(squeue -h -j "$cancelled" 2> /dev/null)" ] || fail "the job does not end: $(squeue)"
[ ! -e ".girandole-secret-$cancelled" ] || fail "the secret of a job that was cancelled is left"

# ---- a rank that is killed ends the step, without srun's -K ----
srun -N2 -n4 "$program" ddp-transformer --epochs 1000000 --metrics metrics > /dev/null 2> killed &
srun=$!
for _ in $(seq 300); do [ -s metrics ] && break; sleep 0.1; done
[ -s metrics ] || fail "the ranks do not train: $(cat killed)"
kill_rank() {
    local pid variables
    for pid in $(pgrep -x girandole); do
        variables=$({ tr '\0' '\n' < "/proc/$pid/environ"; } 2>/dev/null) || continue
        if grep -qx "SLURM_CONF=$SLURM_CONF" <<< "$variables" && grep -qx "SLURM_PROCID=$1" <<< "$variables"; then
            kill -9 "$pid"
        fi
    done
}
kill_rank 2
for _ in $(seq 20); do kill -0 "$srun" 2>/dev/null || break; sleep 0.1; done
! kill -0 "$srun" 2>/dev/null || fail "two seconds after a rank was killed the step goes on"
if wait "$srun"; then fail "a step with a rank that was killed has ended well"; fi
for rank in 0 1 3; do
    grep -q "^rank $rank: error: rank 2 (host .*) died during " killed || fail "rank $rank did not name rank 2: $(cat killed)"
done

# ---- an elastic run goes on without the first rank, as srun leaves the others alone ----
srun --kill-on-bad-exit=0 -N2 -n4 "$program" ddp-transformer --elastic 2:4 --samples 40 --lr 0.001 --epochs 300 \
    --metrics elastic > /dev/null 2> lost &
srun=$!
for _ in $(seq 600); do [ -e elastic ] && [ "$(wc -l < elastic)" -ge 60 ] && break; sleep 0.05; done
[ "$(wc -l < elastic)" -ge 60 ] || fail "the ranks do not train: $(cat lost)"
kill_rank 0
for _ in $(seq 1200); do kill -0 "$srun" 2>/dev/null || break; sleep 0.1; done
! kill -0 "$srun" 2>/dev/null || fail "an elastic run does not end: $(cat lost)"
grep -q "3 ranks of 4 go on at epoch" lost || fail "the others do not go on: $(cat lost)"
tail -n 1 elastic | grep -q '"event":"summary".*"world_size":3' || fail "the others have not finished: $(cat lost)"

# ---- a wrong value ----
said=$(SLURM_PROCID=5 SLURM_NTASKS=4 "$program" ddp-transformer 2>&1) && fail "a wrong SLURM_PROCID is taken"
[ "$said" = "error: SLURM_PROCID: got 5; with SLURM_NTASKS=4, give 0 to 3" ] || fail "$said"
echo "Slurm: all is well"
