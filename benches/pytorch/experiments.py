"""The experiments of girandole beside the same in PyTorch with Gloo, in turn, on this machine.

What PyTorch does is in the scripts that made the golden values of the tests (bin/tests/fixtures); tensor parallelism, which those
compute in one process, is here, by torch.distributed.tensor.parallel. All have 2 ranks of one thread each.

A figure is the time of a step. Of PyTorch's that is the time from the end of the first step to the end of the last one, by their
number less one, on rank 0; of ours all of the training loop, as `--metrics` gives it, by the number of steps.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "bin" / "tests" / "fixtures"
sys.path.insert(0, str(FIXTURES))

RANKS = 2
# The command's options, and the arguments of PyTorch's side.
EXPERIMENTS = {
    "ddp-linear": (["--epochs", "10"], dict(epochs=10)),
    "ddp-trainer": (
        ["--epochs", "30"],
        dict(seed=42, samples=2048, batch_size=32, lr=1e-3, epochs=30, loss="mse"),
    ),
    "ddp-transformer": ([], dict(seed=42, samples=12, epochs=200, mask="document", dropout=0.1)),
    "ddp-mlp": (
        ["--epochs", "1000", "--batch-size", "32"],
        dict(seed=42, batch_size=32, lr=0.01, epochs=1000, validation_samples=100),
    ),
    "cifar10": (
        ["--samples", "2000", "--test-samples", "100", "--batch-size", "4", "--epochs", "1"],
        dict(seed=42, samples=2000, test_samples=100, batch_size=4, lr=1e-3, momentum=0.9, epochs=1),
    ),
    "fsdp-mlp": (
        ["--steps", "10", "--param-dtype", "f32", "--reduce-dtype", "f32"],
        dict(seed=42, features=1024, hidden=4096, batch_size=16, lr=1e-3, steps=10),
    ),
    "tensor-parallel-mlp": (
        ["--tp", "2", "--samples", "512", "--batch-size", "64", "--epochs", "2"],
        dict(seed=42, samples=512, batch_size=64, epochs=2),
    ),
    "tensor-parallel-transformer": (
        ["--tp", "2", "--samples", "512", "--batch-size", "16", "--epochs", "1"],
        dict(seed=42, samples=512, batch_size=16, epochs=1),
    ),
    "pipeline-transformer": (
        ["--dropout", "0"],
        dict(seed=42, samples=12, epochs=200, batch_size=4, micro_batches=2, split=["layers.1"]),
    ),
}


def divided(model, plan, loss, samples, epochs, batch_size, seed):
    """Trains a model whose layers are divided over the ranks as `plan` says."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    model = parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(samples).split(batch_size):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()


def tensor_parallel_mlp(seed, samples, batch_size, epochs):
    import torch
    import torch.nn.functional as F
    from tensor_parallel import Mlp
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    torch.manual_seed(seed)
    x, y = torch.randn(samples, 1024), torch.randn(samples, 1024)
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    loss = lambda model, batch: F.mse_loss(model(x[batch]), y[batch])
    divided(Mlp(1024, 4096), plan, loss, samples, epochs, batch_size, seed)


def tensor_parallel_transformer(seed, samples, batch_size, epochs):
    import torch
    import torch.nn.functional as F
    from tensor_parallel import LanguageModel
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    class Attention(nn.Module):
        """Three layers in place of one, so that each rank has whole heads."""

        def __init__(self, d_model, heads):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
            self.out = nn.Linear(d_model, d_model)
            self.size = d_model // heads

        def forward(self, x):
            heads = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(seed)
    vocab_size, d_model, heads, hidden, layers, max_len, length = 256, 128, 8, 512, 2, 64, 33
    rows = torch.randint(0, vocab_size, (samples, length))
    model = LanguageModel(vocab_size, d_model, heads, hidden, layers, max_len, True)
    plan = {}
    for place, layer in enumerate(model.layers):
        layer.attention = Attention(d_model, heads)
        name = f"layers.{place}"
        plan |= {f"{name}.attention.{part}": ColwiseParallel() for part in "qkv"}
        plan |= {f"{name}.attention.out": RowwiseParallel(), f"{name}.feed_forward.fc2": RowwiseParallel()}
        plan |= {f"{name}.feed_forward.fc1": ColwiseParallel()}

    def loss(model, batch):
        return F.cross_entropy(model(rows[batch, :-1]).flatten(0, 1), rows[batch, 1:].flatten())

    divided(model, plan, loss, samples, epochs, batch_size, seed)


def ddp_linear_rank(rank, world_size, epochs):
    import ddp_linear
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(42)
    dataset = ddp_linear.SimpleDataset(10000)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=ddp_linear.BATCH_SIZE, sampler=sampler)
    ddp_linear.train(DDP(ddp_linear.SimpleModel()), loader, sampler, ddp_linear.LR * world_size, epochs)


def train(rank, world_size, name, arguments):
    """One rank of PyTorch's; the seconds of a step, and how many there were."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    match name:
        case "ddp-linear":
            ddp_linear_rank(rank, world_size, **arguments)
        case "tensor-parallel-mlp":
            tensor_parallel_mlp(**arguments)
        case "tensor-parallel-transformer":
            tensor_parallel_transformer(**arguments)
        case _:
            __import__(name.replace("-", "_")).train(rank, world_size, **arguments)
    return {"seconds": (ends[-1] - ends[0]) / (len(ends) - 1), "steps": len(ends)}


def theirs(name):
    from ranks import on_ranks

    return on_ranks(train, RANKS, name=name, arguments=EXPERIMENTS[name][1])


def ours(girandole, name, folder):
    """The seconds of the training loop."""
    path = os.path.join(folder, "metrics.jsonl")
    command = [girandole, name, "--world-size", str(RANKS), "--metrics", path, *EXPERIMENTS[name][0]]
    # PyTorch's have one thread each, too.
    environment = os.environ | {"RAYON_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    return [line["seconds"] for line in lines if line["event"] == "summary"][-1]


def measure(girandole, names, rounds):
    """For each experiment the seconds of a step, of ours and of theirs, round by round."""
    taken = {name: ([], []) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name in names:
                mine, other = ours(girandole, name, folder), theirs(name)
                taken[name][0].append(mine / other["steps"])
                taken[name][1].append(other["seconds"])
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name, (mine, other) in measure(options.girandole, options.only.split(","), options.rounds).items():
        print(name, [f"{s * 1e3:.3f} ms" for s in mine], [f"{s * 1e3:.3f} ms" for s in other])
