"""Collectives between ranks of one host: ours over shared memory beside Open MPI's, in turn, on this machine.

    cargo build --release -p bin
    python benches/mpi/compare.py --rounds 3

Needs Open MPI (Debian: libopenmpi-dev, openmpi-bin). Both sides call a barrier before each call and give the median on rank 0. With
`--load N` other programs take the processor, too: N processes that compute without end.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

OPERATIONS, SIZES = ["all_reduce", "broadcast", "all_gather", "barrier"], ["4K", "1M", "64M"]


def ours(program, ranks, seconds, folder):
    """Microseconds by operation and size."""
    file = folder / "rows.jsonl"
    file.unlink(missing_ok=True)
    command = [program, "comm-bench", f"--world-size={ranks}", f"--ops={','.join(OPERATIONS)}", f"--sizes={','.join(SIZES)}"]
    subprocess.run([*command, f"--seconds={seconds}", f"--json={file}"], check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, file.read_text().splitlines())
    return {(row["op"], 0 if row["op"] == "barrier" else row["bytes"]): 1e6 * row["s"] for row in rows}


def theirs(program, ranks, operation, size, seconds):
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), program, operation, str(size), str(seconds)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


@contextlib.contextmanager
def loaded(count):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="our program (built with --release)")
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long to measure each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="how many other programs run beside")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, loaded(options.load):
        folder = pathlib.Path(name)
        program = folder / "collectives"
        source = pathlib.Path(__file__).with_name("collectives.c")
        subprocess.run(["mpicc.openmpi", "-O2", "-o", program, source], check=True)
        print("| ranks | operation | bytes | girandole | Open MPI | ratio |\n| --- | --- | --- | --- | --- | --- |")
        for ranks in options.ranks.split(","):
            times = {}
            for _ in range(options.rounds):
                for (operation, size), own in ours(options.girandole, ranks, options.seconds, folder).items():
                    other = theirs(program, ranks, operation, size, options.seconds)
                    times.setdefault((operation, size), []).append((own, other))
            for (operation, size), pairs in times.items():
                own, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
                print(f"| {ranks} | {operation} | {size} | {own:.1f} us | {other:.1f} us | {other / own:.2f} |", flush=True)
