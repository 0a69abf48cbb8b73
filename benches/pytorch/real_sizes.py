"""A Transformer of 27 million parameters: girandole's `ddp-transformer` beside PyTorch's DDP with Gloo, in turn, on this machine.

    cargo build --release -p bin
    python benches/pytorch/real_sizes.py --rounds 3

Vocabulary 8192, d 512, 8 heads, feed-forward 2048, 6 layers, 256 tokens, 4 rows a rank, causal, SGD, no dropout, one thread a rank.
PyTorch computes attention by `scaled_dot_product_attention`, and as the tutorial writes it; the faster one counts. Its bf16 is
`autocast`, ours `--precision bf16`. One rank of PyTorch's is without DDP. The first steps, in which memory is new, count on neither side; peak memory is that of rank 0.

The limit of a step is what its matrix products take alone, forward and backward, at their shapes in the faster of PyTorch's precisions that
the row allows, plus SGD's pass over parameters and gradients; everything else that a step does is counted as free.
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import experiments  # finds the fixtures

SIZES = dict(VOCABULARY=8192, D_MODEL=512, HEADS=8, D_FF=2048, LAYERS=6, MAX_LEN=256, LENGTH=257, BATCH_SIZE=4)
# Of PyTorch's without the first one; of ours what a run of LONG steps takes longer than one of SHORT.
STEPS = 10
SHORT, LONG = 4, 16


def sdpa(self, x, mask):
    import torch.nn.functional as F

    heads = (layer(x).unflatten(-1, (SIZES["HEADS"], -1)).transpose(1, 2) for layer in (self.q_linear, self.k_linear, self.v_linear))
    return self.out_linear(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


def train(rank, world_size, precision, attention, steps):
    """One rank of PyTorch's: the seconds of a step, and the most memory that it held, in MiB."""
    import ddp_transformer
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    for name, size in SIZES.items():
        setattr(ddp_transformer, name, size)
    if attention == "sdpa":
        ddp_transformer.Attention.forward = sdpa
    torch.manual_seed(42)
    model = ddp_transformer.Transformer("causal", 0.0)
    if world_size > 1:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends, losses = [], []
    for step in range(steps):
        first = step * world_size * SIZES["BATCH_SIZE"] + rank
        rows = torch.stack([torch.full((SIZES["LENGTH"],), first + row * world_size) for row in range(SIZES["BATCH_SIZE"])])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": (ends[-1] - ends[0]) / (steps - 1), "losses": losses, "memory": memory}


def limit(rank, world_size, precision, tokens, linear, attention, parameters, optimizer):
    """
    The seconds of a step's matrix products and of its update of the parameters, alone. `linear`: inputs, outputs and number of the linear
    layers; `attention`: number of heads of all rows together, length, features of a head, layers.
    """
    import torch

    # (batch, rows, inner, columns) and how often a step has it; backward has one for the input and one for the weight.
    products = [
        (shape, count)
        for inputs, outputs, count in linear
        for shape in ((1, tokens, inputs, outputs), (1, tokens, outputs, inputs), (1, inputs, tokens, outputs))
    ]
    # Two products forward and four backward, half of each masked.
    groups, length, head, layers = attention
    products += [((groups, length, head, length), 3 * layers / 2), ((groups, length, length, head), 3 * layers / 2)]

    def fastest(call, repeats=5):
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    seconds = 0
    for (b, m, k, n), count in products:
        kinds = [torch.float32, torch.bfloat16] if precision == "bf16" else [torch.float32]
        pairs = [(torch.randn(b, m, k).to(kind), torch.randn(b, k, n).to(kind)) for kind in kinds]
        seconds += count * min(fastest(lambda: torch.bmm(x, y)) for x, y in pairs)
    weights = torch.nn.Parameter(torch.zeros(parameters))
    weights.grad = torch.ones(parameters)
    update = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]([weights], lr=0.01, fused=True)
    return seconds + fastest(update.step)


def shape():
    """What `limit` needs to know of the Transformer."""
    length, d, ff, layers = SIZES["LENGTH"] - 1, SIZES["D_MODEL"], SIZES["D_FF"], SIZES["LAYERS"]
    return dict(
        tokens=SIZES["BATCH_SIZE"] * length,
        linear=[(d, d, 4 * layers), (d, ff, layers), (ff, d, layers), (d, SIZES["VOCABULARY"], 1)],
        attention=(SIZES["BATCH_SIZE"] * SIZES["HEADS"], length, d // SIZES["HEADS"], layers),
        parameters=2 * d * SIZES["VOCABULARY"] + layers * (4 * d * d + 2 * d * ff),
        optimizer="sgd",
    )


def theirs(ranks, precision):
    from ranks import on_ranks

    runs = [on_ranks(train, ranks, precision=precision, attention=attention, steps=STEPS) for attention in ("sdpa", "tutorial")]
    return min(runs, key=lambda run: run["seconds"])


def loop(girandole, ranks, precision, folder, steps):
    """What `--metrics` says in the end."""
    path = os.path.join(folder, "metrics.jsonl")
    options = {
        "world-size": ranks, "precision": precision, "metrics": path, "epochs": 1, "mask": "causal", "dropout": 0,
        "vocab-size": SIZES["VOCABULARY"], "d-model": SIZES["D_MODEL"], "num-heads": SIZES["HEADS"], "d-ff": SIZES["D_FF"],
        "num-layers": SIZES["LAYERS"], "max-len": SIZES["MAX_LEN"], "length": SIZES["LENGTH"],
        "batch-size": SIZES["BATCH_SIZE"], "samples": steps * ranks * SIZES["BATCH_SIZE"],
    }
    command = [girandole, "ddp-transformer", *(f"--{name}={value}" for name, value in options.items())]
    environment = os.environ | {"RAYON_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [line for line in lines if line["event"] == "summary"][-1]


def ours(girandole, ranks, precision, folder):
    short, long = (loop(girandole, ranks, precision, folder, steps) for steps in (SHORT, LONG))
    seconds = (long["seconds"] - short["seconds"]) / (LONG - SHORT)
    return {"seconds": seconds, "memory": long["peak_rss_bytes"][0] / 2**20}


def measure(girandole, rounds, ranks, precisions):
    """For each number of ranks and precision the runs of ours and of theirs, in turn, and the limit's seconds."""
    from ranks import on_ranks

    taken = {(count, precision): ([], [], []) for count in ranks for precision in precisions}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for (count, precision), (mine, other, least) in taken.items():
                mine.append(ours(girandole, count, precision, folder))
                other.append(theirs(count, "f32" if precision == "f32-high" else precision))
                least.append(on_ranks(limit, count, precision=precision, **shape()))
    return taken


def table(girandole, rounds, ranks, precisions):
    """The lines of the table, in Markdown."""
    yield "| ranks | precision | girandole | PyTorch | ratio | limit | of the limit | memory | PyTorch's |"
    yield "| --- " * 9 + "|"
    for (count, precision), (*runs, least) in measure(girandole, rounds, ranks, precisions).items():
        mine, other = (statistics.median(run["seconds"] for run in of) for of in runs)
        memory = (statistics.median(run["memory"] for run in of) for of in runs)
        sizes, least = " | ".join(f"{size:.0f} MiB" for size in memory), statistics.median(least)
        yield f"| {count} | {precision} | {mine:.3f} s | {other:.3f} s | {other / mine:.2f} | {least:.3f} s | {mine / least:.2f} | {sizes} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--precisions", default="f32,bf16")
    options = parser.parse_args()
    if not os.access(options.girandole, os.X_OK):
        sys.exit(f"error: --girandole: there is no program {options.girandole}; build it: cargo build --release -p bin")
    ranks = [int(count) for count in options.ranks.split(",")]
    for line in table(options.girandole, options.rounds, ranks, options.precisions.split(",")):
        print(line, flush=True)
