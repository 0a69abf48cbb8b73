"""Collectives of girandole beside PyTorch's with Gloo, in turn, on this machine.

    cargo build --release -p bin
    python benches/pytorch/collectives.py --ranks 2,4 --transport auto

Needs `pip install torch numpy`. Runs ours, theirs, ours, theirs, ...; each figure is the median over the rounds of the
median time of a call on rank 0, with a barrier before each call. Sizes are those of the whole buffer: for all_gather and
reduce_scatter of all ranks' parts together, on both sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# All that can be measured on both sides, with --ops all.
ALL_OPS = [*OPS, "reduce", "gather", "scatter", "all_to_all", "send_recv", "barrier"]
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text):
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def gloo_rank(rank, world, meeting, ops, sizes, seconds, out):
    """One rank of PyTorch's group; rank 0 writes a line for each operation and size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    lines = []
    for op in ops:
        for bytes_ in [0] if op == "barrier" else sizes:
            whole = torch.ones(bytes_ // 4)
            part = torch.ones(bytes_ // 4 // world)
            parts, first = list(whole.clone().split(max(1, len(part)))), rank == 0
            after, before, other = (rank + 1) % world, (rank - 1) % world, torch.ones(bytes_ // 4)

            def send_recv():
                sent = dist.isend(whole, after)
                dist.recv(other, before)
                sent.wait()

            calls = {
                "all_reduce": lambda: dist.all_reduce(whole),
                "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
                "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
                "broadcast": lambda: dist.broadcast(whole, 0),
                "reduce": lambda: dist.reduce(whole, 0),
                "gather": lambda: dist.gather(part, parts if first else None, 0),
                "scatter": lambda: dist.scatter(part, parts if first else None, 0),
                "all_to_all": lambda: dist.all_to_all_single(other, whole),
                "send_recv": send_recv,
                "barrier": dist.barrier,
            }
            call = calls[op]

            def timed(count):
                times = []
                for _ in range(count):
                    dist.barrier()
                    began = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - began)
                return times

            estimate = statistics.median(timed(3))
            count = torch.tensor([min(2000, max(5, int(seconds / estimate)))])
            dist.broadcast(count, 0)
            lines.append({"op": op, "world": world, "bytes": bytes_, "s": statistics.median(timed(int(count)))})
    if rank == 0:
        with open(out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.destroy_process_group()


def theirs(folder, world, options):
    out, meeting = os.path.join(folder, "gloo.jsonl"), os.path.join(folder, "meeting")
    if os.path.exists(meeting):
        os.remove(meeting)
    arguments = [str(world), meeting, options.ops, options.sizes, str(options.seconds), out]
    ranks = [
        subprocess.Popen([sys.executable, os.path.abspath(__file__), "--gloo-rank", str(rank), *arguments])
        for rank in range(world)
    ]
    if any([rank.wait() for rank in ranks]):
        sys.exit("PyTorch's ranks failed")
    return read(out)


def ours(folder, world, options):
    out = os.path.join(folder, "ours.jsonl")
    command = [options.girandole, "comm-bench", "--world-size", str(world), "--ops", options.ops]
    command += ["--sizes", options.sizes, "--seconds", str(options.seconds), "--json", out]
    command += ["--transport", options.transport]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read(out)


def read(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    return {(row["op"], row["bytes"]): row["s"] for row in rows}


def measure(world, options):
    """Seconds of a call by operation and size, of ours and of theirs."""
    taken = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            taken["ours"].append(ours(folder, world, options))
            taken["theirs"].append(theirs(folder, world, options))
    middle = lambda runs, key: statistics.median(run[key] for run in runs)
    return {key: (middle(taken["ours"], key), middle(taken["theirs"], key)) for key in taken["ours"][0]}


def compare(world, options):
    measured = measure(world, options)
    print(f"\n{world} ranks, --transport {options.transport}, {options.rounds} rounds in turn, median of a call")
    print(f"{'operation':<15}{'bytes':>12}{'girandole':>14}{'Gloo':>14}{'ratio':>9}")
    for key, (mine, gloo) in measured.items():
        print(f"{key[0]:<15}{key[1]:>12}{mine * 1e6:>11.1f} us{gloo * 1e6:>11.1f} us{gloo / mine:>8.1f}x", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--ops", default=",".join(OPS), help="separated by commas, or all")
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shm"])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each operation and size, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.ops = ",".join(ALL_OPS) if options.ops == "all" else options.ops
    for world in options.ranks.split(","):
        compare(int(world), options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gloo-rank"]:
        rank, world, meeting, ops, sizes, seconds, out = sys.argv[2:]
        sizes = [size(text) for text in sizes.split(",")]
        gloo_rank(int(rank), int(world), meeting, ops.split(","), sizes, float(seconds), out)
    else:
        main()
