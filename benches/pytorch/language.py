"""Language models: `girandole pretrain` and `girandole finetune` beside transformers (and peft) with PyTorch, in turn, on this machine.

    cargo build --release -p bin
    pip install torch transformers peft
    python benches/pytorch/language.py pretrain
    python benches/pytorch/language.py lora
    python benches/pytorch/language.py gpt2
    python benches/pytorch/language.py moe --experts eager --ranks 1

`pretrain`: a Llama of 10.7 million parameters, a token for each byte, 256 tokens a row, AdamW with clipping, one thread a rank. Both begin
with the same weights and take the same rows in the same order; losses of all steps are compared. `lora`: SmolLM2's shape of 135 million
parameters with random weights and adapters of rank 8 beside all linear layers, products in bf16. `gpt2`: GPT-2's smallest shape, 124 million parameters with random weights and no dropout, 64 tokens a row. `moe`: a Qwen3-MoE of 130 million parameters, random, of which a token uses 32 million (16 experts, 2 of them for a token);
`--experts` names how `transformers` computes its experts. Speed is that of all steps but the
first ones, in which memory is new. The text is the guide's, many times over, unless `--text` gives another. Where other programs run beside, it says less than the processor's time: that of all ranks together for a
step, without what comes before the first and after the last. Memory is the most that a rank held.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bin/tests/fixtures"))

# Steps at the beginning that do not count.
NEW = 3
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "initializer_range": 0.041666666666666664, "tie_word_embeddings": True,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
    "n_head": 12, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "initializer_range": 0.02, "tie_word_embeddings": True,
    "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False,
}
# What is trained from a shape: its configuration, precisions, tokens of a row, learning rate, rank of the adapters.
SHAPES = {"lora": (SMOLLM2, "bf16", 256, 1e-3, 8), "gpt2": (GPT2, "f32,bf16", 64, 1e-4, None), "moe": (QWEN3_MOE, "f32,bf16", 256, 1e-4, None)}


def train(rank, world_size, folder, text, length, batch, steps, lr, lora, precision, compiled, experts):
    """One rank of PyTorch's."""
    import torch
    import torch.nn.functional as F
    import transformers
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16-parameters" else torch.float32
    how = {"experts_implementation": experts} if experts else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
    model.train()
    if lora:
        import peft

        config = peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world_size > 1:
        model = DDP(model)
    if compiled:
        model = torch.compile(model)
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    tokens = torch.frombuffer(bytearray(pathlib.Path(text).read_bytes()), dtype=torch.uint8)
    losses, times, busy = [], [], []
    for step in range(steps):
        began, computed = time.perf_counter(), time.process_time()
        rows = range(step * batch + rank, (step + 1) * batch, world_size)
        piece = torch.stack([tokens[row * length : (row + 1) * length + 1].long() for row in rows])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            logits = model(input_ids=piece[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), piece[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        total = loss.detach()
        if world_size > 1:
            torch.distributed.all_reduce(total)
            total /= world_size
        losses.append(total.item())
        times.append(time.perf_counter() - began)
        busy.append(time.process_time() - computed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = world_size * statistics.median(busy[NEW:])
    return {"speed": batch * length / statistics.median(times[NEW:]), "losses": losses, "memory": memory, "cpu": cpu}


def run(girandole, command, **options):
    """Runs a command; gives the processor's time of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    environment = os.environ | {"RAYON_NUM_THREADS": "1"}
    subprocess.run([girandole, command, *arguments, "--no-shuffle"], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(girandole, command, ranks, batch, length, steps, **options):
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        common = dict(mesh=f"dp={ranks}", batch_size=batch, length=length, schedule="constant", **options)
        # The start and the end, and a step.
        alone = run(girandole, command, out=os.path.join(folder, "first"), steps=1, **common)
        all_steps = run(girandole, command, out=os.path.join(folder, "out"), metrics=metrics, steps=steps, **common)
        lines = [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    taken = [line for line in lines if line["event"] == "step"]
    summary = [line for line in lines if line["event"] == "summary"][-1]
    return {
        "speed": statistics.median(step["tokens_per_second"] for step in taken[NEW:]),
        "losses": [step["loss"] for step in taken],
        "memory": max(summary["peak_rss_bytes"]) / 2**20,
        "cpu": (all_steps - alone) / (steps - 1),
    }


def gpt2_limit(ranks, precision, batch, length):
    """Tokens per second if a step were its matrix products and AdamW's pass alone, as `real_sizes.py` measures them."""
    from ranks import on_ranks
    from real_sizes import limit

    d, layers, heads, rows = GPT2["n_embd"], GPT2["n_layer"], GPT2["n_head"], batch // ranks
    seconds = on_ranks(
        limit, ranks, precision=precision, tokens=rows * length, attention=(rows * heads, length, d // heads, layers), optimizer="adamw",
        linear=[(d, 3 * d, layers), (d, d, layers), (d, 4 * d, layers), (4 * d, d, layers), (d, GPT2["vocab_size"], 1)],
        parameters=d * (GPT2["vocab_size"] + GPT2["n_positions"]) + 12 * layers * d * d,
    )
    return batch * length / seconds


def measure(options, begin, batch, length, steps, lr, lora):
    """The lines of the table, in Markdown."""
    from ranks import on_ranks

    yield "| ranks | precision | girandole | PyTorch | ratio | limit | CPU s per step | PyTorch's | losses apart | memory | PyTorch's |"
    yield "| --- " * 11 + "|"
    for ranks in (int(count) for count in options.ranks.split(",")):
        for precision in options.precisions.split(","):
            mine, other, least = [], [], []
            has_limit = options.what == "gpt2" and precision != "bf16-parameters"
            for _ in range(options.rounds):
                more = {"lora_rank": lora} if lora else {}
                more |= {"parameters": "bf16"} if precision == "bf16-parameters" else {"precision": precision}
                mine.append(
                    ours(
                        options.girandole, "finetune", ranks, batch, length, model=begin, data=options.text, steps=steps, lr=lr,
                        **more,
                    )
                )
                other.append(
                    on_ranks(
                        train, ranks, folder=begin, text=options.text, length=length, batch=batch, steps=steps, lr=lr, lora=lora,
                        precision=precision, compiled=options.compiled, experts=options.experts,
                    )
                )
                if has_limit:
                    least.append(gpt2_limit(ranks, precision, batch, length))
            speeds = [statistics.median(one["speed"] for one in of) for of in (mine, other)]
            memory = [statistics.median(one["memory"] for one in of) for of in (mine, other)]
            cpu = [statistics.median(one["cpu"] for one in of) for of in (mine, other)]
            limit = f"{statistics.median(least):.0f} tokens/s" if least else ""
            apart = max(abs(a - b) for a, b in zip(mine[0]["losses"], other[0]["losses"]))
            yield (
                f"| {ranks} | {precision} | {speeds[0]:.0f} tokens/s | {speeds[1]:.0f} tokens/s | {speeds[0] / speeds[1]:.2f} | {limit} | "
                f"{cpu[0]:.1f} | {cpu[1]:.1f} | {apart:.1e} | {memory[0]:.0f} MiB | {memory[1]:.0f} MiB |"
            )


def guide(folder):
    """A file of some megabytes: the guide, many times over."""
    book = pathlib.Path(__file__).resolve().parents[2] / "book/src"
    text = "".join(page.read_text() for page in sorted(book.glob("*.md")))
    path = pathlib.Path(folder, "text.txt")
    path.write_text(text * (1 + 4_000_000 // len(text)))
    return str(path)


def table(options):
    """The lines of what `options` ask for."""
    with tempfile.TemporaryDirectory() as folder:
        options.text = options.text or guide(folder)
        begin = os.path.join(folder, "begin")
        # A step that changes nothing: new weights in a folder that both begin with.
        first = dict(data=options.text, out=begin, steps=1, lr=0, weight_decay=0, batch_size=1)
        if options.what == "pretrain":
            options.precisions = options.precisions or "f32"
            run(options.girandole, "pretrain", **first)
            yield from measure(options, begin, options.rows or 8, options.length or 256, steps=options.steps or 50, lr=1e-3, lora=None)
        else:
            shape, precisions, length, lr, lora = SHAPES[options.what]
            options.precisions = options.precisions or precisions
            length = options.length or length
            config = os.path.join(folder, "config")
            os.mkdir(config)
            pathlib.Path(config, "config.json").write_text(json.dumps(shape))
            run(options.girandole, "pretrain", model=config, tokenizer="bytes", length=length, **first)
            yield from measure(options, begin, options.rows or 4, length, steps=options.steps or 12, lr=lr, lora=lora)


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pretrain", *SHAPES])
    parser.add_argument("--text", help="a text of some megabytes")
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--precisions", default=None, help="f32, bf16 (products), bf16-parameters (all in bf16)")
    parser.add_argument("--compiled", action="store_true", help="PyTorch's model by torch.compile, which needs a C++ compiler")
    parser.add_argument("--experts", default=None, help="how transformers computes experts: eager, batched_mm, grouped_mm [default: its own choice]")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rows", type=int, default=None, help="rows of a step")
    parser.add_argument("--length", type=int, default=None, help="tokens of a row")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps <= NEW:
        parser.error(f"--steps: give more than {NEW}, which do not count")
    return options


if __name__ == "__main__":
    for line in table(parsed()):
        print(line, flush=True)
