"""Causal attention over lengths, forward and backward: ours beside PyTorch's `scaled_dot_product_attention`, in turn, on this machine.

    cargo build --release -p girandole-benches
    python benches/pytorch/attention.py

One row, 8 heads of width 64, f32, one thread; each length in a process of its own. Memory is what the process grew by beyond queries,
keys and values, at its peak.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

HEADS, WIDTH = 8, 64


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def theirs(length, seconds):
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, length, HEADS * WIDTH, requires_grad=True) for _ in range(3))
    weights = torch.randn(1, length, HEADS * WIDTH)

    def run():
        heads = (x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        y.backward(weights)
        q.grad = k.grad = v.grad = None

    before = peak()
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    print(statistics.median(times), peak() - before)


def figures(command):
    # The allocator keeps freed memory as long as in the program `girandole`.
    threads = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | threads | {"MIMALLOC_PURGE_DELAY": "60000"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return [float(figure) for figure in output.split()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="target/release/attention", help="our program (built with --release)")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to measure each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.theirs:
        theirs(options.theirs, options.seconds)
        sys.exit()
    if not os.access(options.attention, os.X_OK):
        sys.exit(f"error: --attention: there is no program {options.attention}; build it: cargo build --release -p girandole-benches")
    print("| length | girandole | PyTorch | ratio | memory | PyTorch's |\n| --- | --- | --- | --- | --- | --- |")
    for length in options.lengths.split(","):
        seconds = f"--seconds={options.seconds}"
        pairs = [
            (figures([options.attention, length, seconds]), figures([sys.executable, __file__, "--theirs", length, seconds]))
            for _ in range(options.rounds)
        ]
        (ours, our_memory), (other, other_memory) = (
            [statistics.median(pair[side][figure] for pair in pairs) for figure in (0, 1)] for side in (0, 1)
        )
        print(
            f"| {length} | {1e3 * ours:.2f} ms | {1e3 * other:.2f} ms | {other / ours:.2f} | {our_memory:.1f} MiB | "
            f"{other_memory:.1f} MiB |",
            flush=True,
        )
