"""All experiments and collectives of girandole beside PyTorch's with Gloo, in turn, on this machine: a table of ratios.

    cargo build --release -p bin
    python benches/pytorch/compare.py --out ratios.md

Needs `pip install torch numpy transformers`. Ours, theirs, ours, theirs, ...; each figure is the median over the rounds. What is
compared how is in experiments.py, real_sizes.py, language.py and collectives.py. A ratio is how often ours does it in the time that PyTorch
takes once.
"""

import argparse
import datetime
import os
import pathlib
import platform
import statistics
import sys

import collectives
import experiments
import language
import real_sizes


def processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def shown(seconds):
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def row(name, mine, other):
    return f"| {name} | {shown(mine)} | {shown(other)} | {other / mine:.2g} |"


def size(count):
    for unit, bytes_ in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_ and count % bytes_ == 0:
            return f"{count // bytes_} {unit}"
    return f"{count} B"


def parts(text):
    return [part for part in text.split(",") if part]


def write(options):
    import torch

    today, cores = datetime.date.today(), len(os.sched_getaffinity(0))
    yield f"{cores} cores of {processor()}, {today}, PyTorch {torch.__version__} with Gloo, medians of {options.rounds} rounds in turn."
    yield ""
    yield f"| a step of, {experiments.RANKS} ranks with one thread each | girandole | PyTorch | ratio |"
    yield "| --- | --- | --- | --- |"
    taken = experiments.measure(options.girandole, parts(options.experiments), options.rounds)
    for name, (mine, other) in taken.items():
        yield row(name, statistics.median(mine), statistics.median(other))
    ranks = options.model_ranks
    for model in parts(options.models):
        yield ""
        if model == "transformer":
            yield "A Transformer of 27 million parameters, 1,024 tokens a rank, SGD, one thread a rank."
            yield ""
            counts = [int(count) for count in parts(ranks)]
            yield from real_sizes.table(options.girandole, options.rounds, counts, parts(options.precisions))
        else:
            compiled = "torch.compile" if options.compiled else "not compiled"
            yield f"GPT-2 of 124 million parameters, 4 rows of 64 tokens for each step of all ranks, AdamW, PyTorch's {compiled}."
            yield ""
            arguments = ["gpt2", f"--girandole={options.girandole}", f"--rounds={options.rounds}", f"--ranks={ranks}"]
            arguments += [f"--precisions={options.precisions}"] + ["--compiled"] * options.compiled
            yield from language.table(language.parsed(arguments))
    for transport in parts(options.transports):
        for world in parts(options.ranks):
            yield ""
            yield f"| {world} ranks, {'shared memory' if transport == 'shm' else transport} | girandole | Gloo | ratio |"
            yield "| --- | --- | --- | --- |"
            options.transport = transport
            for (op, count), (mine, other) in collectives.measure(int(world), options).items():
                yield row(f"{op} {size(count)}" if count else op, mine, other)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--experiments", default=",".join(experiments.EXPERIMENTS), help="which, separated by commas")
    parser.add_argument("--models", default="transformer,gpt2", help="which of transformer and gpt2, at real size, separated by commas")
    parser.add_argument("--model-ranks", default="1,2", help="ranks of these models")
    parser.add_argument("--precisions", default="f32,bf16", help="of these models")
    parser.add_argument("--compiled", action="store_true", help="PyTorch's GPT-2 by torch.compile, which needs a C++ compiler")
    parser.add_argument("--ops", default=",".join(collectives.ALL_OPS))
    parser.add_argument("--sizes", default="4K,1M,64M")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each operation and size, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="file for the tables, in Markdown")
    options = parser.parse_args()
    if unknown := set(parts(options.models)) - {"transformer", "gpt2"}:
        parser.error(f"--models: {', '.join(sorted(unknown))}; give transformer, gpt2 or both")
    if not os.access(options.girandole, os.X_OK):
        sys.exit(f"error: --girandole: there is no program {options.girandole}; build it: cargo build --release -p bin")
    with open(options.out, "w") if options.out else sys.stdout as file:
        for line in write(options):
            print(line, file=file, flush=True)
