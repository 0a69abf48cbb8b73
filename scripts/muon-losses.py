#!/usr/bin/env python3
"""Compares 20 losses of `girandole finetune --optimizer muon` with those of transformers, torch.optim.Muon and torch.optim.AdamW.

    python3 scripts/muon-losses.py target/release/girandole      (needs pip install torch transformers)

PyTorch computes Newton-Schulz in bf16, the program in f32. So the losses are compared twice: with torch.optim.Muon as it is, within 5e-3,
and with the same iterations in f32, within 1e-5."""

import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.optim._muon as muon
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F

STEPS, ROWS, LENGTH, WORDS = 20, 4, 32, 97
IN_BF16 = muon._zeropower_via_newtonschulz


def in_f32(grad, coefficients, steps, eps):
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def theirs(folder, rows, adjust, lr, adamw_lr):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = list(model.named_parameters())
    is_hidden = lambda name, p: p.dim() > 1 and "embed_tokens" not in name and "lm_head" not in name
    hidden = [p for name, p in named if is_hidden(name, p)]
    others = [p for name, p in named if not is_hidden(name, p)]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizers = [
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.1, adjust_lr_fn=adjust),
        torch.optim.AdamW(groups, lr=adamw_lr, betas=(0.9, 0.95)),
    ]
    losses = []
    for batch in rows.split(ROWS):
        model.zero_grad()
        loss = F.cross_entropy(model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def ours(program, folder, mesh, adjust, lr, adamw_lr):
    path = lambda name: os.path.join(folder, name)
    options = {
        "model": folder, "data": path("rows.safetensors"), "out": path("out"), "metrics": path("metrics.jsonl"), "length": LENGTH,
        "steps": STEPS, "batch-size": ROWS, "schedule": "constant", "optimizer": "muon", "adjust-lr": adjust, "lr": lr,
        "adamw-lr": adamw_lr, "mesh": mesh,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([program, "finetune", "--no-shuffle", "--overwrite", *arguments], check=True, stdout=subprocess.DEVNULL)
    with open(path("metrics.jsonl")) as lines:
        events = [json.loads(line) for line in lines]
    return [event["loss"] for event in events if event["event"] == "step"]


def main(program):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=144, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.05,
    )
    rows = torch.randint(0, WORDS, (STEPS * ROWS, 1)) + torch.arange(LENGTH + 1) * torch.randint(1, 5, (STEPS * ROWS, 1))
    rows = (rows * rows // 7) % WORDS
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        save_file({"tokens": rows}, os.path.join(folder, "rows.safetensors"))
        for how in [("match_rms_adamw", 0.01, 0.01), ("original", 0.02, 0.003), ("spectral_unclamped", 0.02, 0.003)]:
            for iterations, most in [(IN_BF16, 5e-3), (in_f32, 1e-5)]:
                muon._zeropower_via_newtonschulz = iterations
                expected = theirs(folder, rows, *how)
                for mesh in ["dp=1", "shard=2", "tp=2"]:
                    got = ours(program, folder, mesh, *how)
                    gap = max(abs(a - b) for a, b in zip(got, expected, strict=True))
                    wrong |= not gap < most
                    print(f"{how[0]}, {mesh}, {'bf16' if iterations is IN_BF16 else 'f32'}: {gap:.1e} apart, at most {most}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
