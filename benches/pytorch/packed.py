"""A Llama on packed rows: `girandole finetune` beside transformers with PyTorch's `scaled_dot_product_attention` and a dense mask, in turn, on
this machine.

    cargo build --release -p bin
    pip install torch transformers
    python benches/pytorch/packed.py

A row of 2,048 tokens has 8 documents of 256, which do not see each other: PyTorch gets an additive mask of (rows, 1, length, length), and positions
that begin with each document. Both begin with the same weights and take the same rows in the same order, f32, AdamW with clipping, one thread;
losses of all steps are compared. Speed is that of all steps but the first ones, in which memory is new.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

# Steps at the beginning that do not count.
NEW = 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": False,
}


def theirs(folder, tokens, length, document, steps, lr):
    """Seconds and loss of each step of PyTorch's."""
    import torch
    import torch.nn.functional as F
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    place = torch.arange(length)
    seen = (place[:, None] // document == place // document).tril()
    mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    times, losses = [], []
    for step in range(steps):
        began = time.perf_counter()
        inputs = torch.tensor(tokens[step * length : (step + 1) * length])
        targets = torch.cat([inputs[1:], torch.tensor([-100])])
        targets[document - 1 :: document] = -100
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs[None], attention_mask=mask, position_ids=(place % document)[None], use_cache=False).logits
        loss = F.cross_entropy(logits[0], targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    return times, losses


def ours(girandole, folder, data, length, steps, lr):
    with tempfile.TemporaryDirectory() as out:
        metrics = os.path.join(out, "metrics.jsonl")
        command = [
            girandole, "finetune", "--no-shuffle", f"--model={folder}", f"--data={data}", f"--out={out}/out", f"--metrics={metrics}",
            "--packing=documents", f"--length={length}", f"--steps={steps}", f"--lr={lr}", "--batch-size=1", "--schedule=constant",
            "--check-gradient=off", "--mesh=dp=1",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"RAYON_NUM_THREADS": "1"})
        lines = [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    taken = [line for line in lines if line["event"] == "step"]
    counted = length - length // options.document
    return [counted / line["tokens_per_second"] for line in taken], [line["loss"] for line in taken]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--document", type=int, default=256, help="tokens of a document, a divisor of the length")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--theirs", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.length % options.document:
        parser.error("--document: give a divisor of --length")
    if options.steps <= NEW:
        parser.error(f"--steps: give more than {NEW}, which do not count")
    count, lr = options.steps * options.length, 1e-3
    # Any tokens: the same for both.
    tokens = [(place * 7919 + place * place % 61) % CONFIG["vocab_size"] for place in range(count + options.document)]
    if options.theirs:
        folder, result = options.theirs
        pathlib.Path(result).write_text(json.dumps(theirs(folder, tokens, options.length, options.document, options.steps, lr)))
        sys.exit()
    import torch
    import transformers

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
    write_documents = __import__("random-models").write_documents
    with tempfile.TemporaryDirectory() as folder:
        begin, data, result = (os.path.join(folder, name) for name in ("begin", "data.tokens", "result.json"))
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**CONFIG | {"num_hidden_layers": options.layers})
        model = transformers.AutoModelForCausalLM.from_config(config)
        print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
        model.save_pretrained(begin)
        del model
        documents = [tokens[first : first + options.document] for first in range(0, len(tokens), options.document)]
        write_documents(data, CONFIG["vocab_size"], documents, [[True] * len(document) for document in documents])
        more = [f"--{name}={getattr(options, name)}" for name in ("length", "document", "steps")]
        mine, other = [], []
        for _ in range(options.rounds):
            mine.append(ours(options.girandole, begin, data, options.length, options.steps, lr))
            subprocess.run([sys.executable, __file__, "--theirs", begin, result, *more], check=True, stdout=subprocess.DEVNULL)
            other.append(json.loads(pathlib.Path(result).read_text()))
        speeds = [options.length / statistics.median(time for times, _ in of for time in times[NEW:]) for of in (mine, other)]
        apart = max(abs(a - b) for a, b in zip(mine[0][1], other[0][1]))
        print("| girandole | PyTorch | ratio | losses apart |\n| --- | --- | --- | --- |")
        print(f"| {speeds[0]:.0f} tokens/s | {speeds[1]:.0f} tokens/s | {speeds[0] / speeds[1]:.2f} | {apart:.1e} |")
        print("load:", *(f"{load:.1f}" for load in os.getloadavg()))
