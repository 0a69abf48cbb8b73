#!/usr/bin/env python3
"""Random models in random layouts: `girandole finetune` beside transformers (and peft) with PyTorch.

    cargo build -p bin
    pip install torch transformers peft
    scripts/random-models.py --count 50           # all weights
    scripts/random-models.py --count 50 --lora    # adapters, of any variant
    scripts/random-models.py --count 50 --packed  # rows of documents in every run
    pip install bitsandbytes accelerate
    scripts/random-models.py --count 50 --in-4-bits  # adapters on a base in 4 bits

Each seed draws a family, sizes, windows, rotary scaling, biases, ties, files of some dtype, rows or documents and how they are packed, a layout
of at most 8 ranks, accumulation, recomputation, schedule and clipping. transformers gets packed rows with a mask of each document's own tokens,
and positions that begin with each document. Both take the same steps from the same folder. Losses must agree within 1e-4, and what is saved must have the other's
logits when transformers loads it. A model whose choice of experts is nearly tied
in some step, and whose losses then differ, is listed apart. A seed that fails is printed with its command and configuration, and taken again by `--first SEED --count 1`.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers

STEPS, RANKS = 5, 4
LOSSES, LOGITS, ROUNDED = 1e-4, 3e-3, 1e-1
IGNORED = -100
# Where an expert's share leads by less, rounding may choose another one, and losses jump.
TIED = 1e-3


def rotary(draw):
    kind = draw.choice(["default", "linear", "llama3", "yarn"])
    own = {
        "default": {},
        "linear": {"factor": draw.choice([2.0, 4.0])},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0]),
            "original_max_position_embeddings": draw.choice([8, 16]),
        },
        "yarn": {"factor": draw.choice([2.0, 4.0]), "original_max_position_embeddings": draw.choice([8, 12])},
    }
    return {"rope_type": kind, "rope_theta": draw.choice([1e4, 5e5, 1e6]), **own[kind]}


def configuration(draw, in_4_bits, only):
    """A configuration that girandole supports, of one family only if it is named."""
    drawn = draw.choice(["llama", "llama", "mistral", "qwen2", "qwen3", "gpt2"] + ([] if in_4_bits else ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]))
    family = only or drawn
    heads, width = (draw.choice([2, 4]), 64) if in_4_bits else (draw.choice([2, 3, 4, 6, 8]), draw.choice([4, 8, 16]))
    wide = draw.choice([128, 256]) if in_4_bits else draw.choice([20, 36, 60])
    layers, vocabulary, positions = draw.choice([2, 3, 4]), draw.choice([37, 64, 101, 130]), draw.choice([16, 24, 40])
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=positions, n_embd=heads * width, n_layer=layers, n_head=heads,
            n_inner=wide if in_4_bits else draw.choice([None, 20, 52]), activation_function=draw.choice(["gelu_new", "gelu", "silu"]), attn_pdrop=0, embd_pdrop=0,
            resid_pdrop=0, layer_norm_epsilon=draw.choice([1e-5, 1e-3]), tie_word_embeddings=draw.random() < 0.7,
        )
    common = dict(
        vocab_size=vocabulary, hidden_size=heads * width, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=draw.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        max_position_embeddings=positions, rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-3]), tie_word_embeddings=draw.random() < 0.5,
        hidden_act=draw.choice(["silu", "gelu", "gelu_pytorch_tanh"]), rope_parameters=rotary(draw),
    )
    if family == "deepseek_v3":
        return latent(draw, heads, layers, common)
    if family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        common |= dict(num_experts_per_tok=draw.choice([1, 2, 3]), router_aux_loss_coef=0.0)
        several = draw.choice([5, 6, 7, 8])
        if family == "mixtral":
            # Its rotary embedding takes no width that is left out.
            return transformers.MixtralConfig(**common, head_dim=width, num_local_experts=several, sliding_window=draw.choice([None, 7]))
        common |= dict(num_experts=several, moe_intermediate_size=draw.choice([12, 20]), norm_topk_prob=draw.random() < 0.5,
                       decoder_sparse_step=draw.choice([1, 1, 2]), mlp_only_layers=draw.choice([[], [0], [1]]))
        if family == "qwen2_moe":
            return transformers.Qwen2MoeConfig(**common, shared_expert_intermediate_size=draw.choice([12, 28]))
        return transformers.Qwen3MoeConfig(**common, head_dim=width)
    if family == "qwen2":
        window = dict(use_sliding_window=draw.random() < 0.4, sliding_window=5, max_window_layers=draw.choice([0, 1, 2]))
        return transformers.Qwen2Config(**common, **window)
    # Heads that are wider or narrower than the model divided by them.
    common |= {"head_dim": width, "hidden_size": heads * (width if in_4_bits else draw.choice([width, width + 2]))}
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=draw.choice([None, 3, 7, 100]))
    if family == "qwen3":
        return transformers.Qwen3Config(**common, attention_bias=draw.random() < 0.3)
    return transformers.LlamaConfig(**common, attention_bias=draw.random() < 0.3, mlp_bias=draw.random() < 0.3)


def latent(draw, heads, layers, common):
    """DeepSeek V3: latent attention, experts in groups, layers without experts at the beginning."""
    groups, of_group = draw.choice([(1, 5), (1, 8), (2, 3), (2, 4), (3, 2)])
    chosen_groups = draw.randint(1, groups)
    return transformers.DeepseekV3Config(
        **common | {"num_key_value_heads": heads}, n_routed_experts=groups * of_group, n_group=groups, topk_group=chosen_groups,
        num_experts_per_tok=draw.randint(1, min(3, chosen_groups * of_group)), moe_intermediate_size=draw.choice([12, 20]),
        n_shared_experts=draw.choice([1, 2]), first_k_dense_replace=draw.choice([0, 1, 1, layers - 1]),
        norm_topk_prob=draw.random() < 0.6, routed_scaling_factor=draw.choice([1.0, 2.5]), rope_interleave=draw.random() < 0.7,
        q_lora_rank=draw.choice([None, 12, 20]), kv_lora_rank=draw.choice([8, 18]), qk_nope_head_dim=draw.choice([6, 10]),
        qk_rope_head_dim=draw.choice([4, 6]), v_head_dim=draw.choice([6, 12, 18]), attention_bias=draw.random() < 0.3,
    )


def layout(draw, config):
    """Sizes of some axes."""
    names = ("n_head", "n_head") if config.model_type == "gpt2" else ("num_attention_heads", "num_key_value_heads")
    divides = all(getattr(config, name) % 2 == 0 for name in names)
    axes = draw.sample(["pp", "dp", "shard", "tp"], draw.choice([0, 1, 1, 2, 2]))
    return [axis for axis in axes if axis != "tp" or divides]


def variant(draw, config, is_gpt2):
    """rsLoRA, DoRA, ranks and alphas by pattern, modules trained whole: some of them, or none."""
    some = {}
    if draw.random() < 0.4:
        some["use_rslora"] = True
    if draw.random() < 0.5:
        some["use_dora"] = True
    # With every choice of targets they match a layer with an adapter.
    ends = [r"c_(attn|proj)"] if is_gpt2 else [r"[qk]_proj", r"layers\.1\..*[qk]_proj"]
    if draw.random() < 0.4:
        some["rank_pattern"] = {draw.choice(ends): draw.choice([1, 3, 5])}
    if draw.random() < 0.4:
        some["alpha_pattern"] = {draw.choice(ends): draw.choice([2, 6])}
    if draw.random() < 0.4:
        embedding = "wte" if is_gpt2 else "embed_tokens"
        whole = ["lm_head"] if config.tie_word_embeddings else draw.choice([[embedding], ["lm_head"], [embedding, "lm_head"]])
        some |= {"modules_to_save": whole, "ensure_weight_tying": config.tie_word_embeddings}
    return some


def adapters(draw, of_variant, model, folder):
    import peft

    is_gpt2 = model.config.model_type == "gpt2"
    some = [["c_attn"], ["c_proj", "c_fc"]] if is_gpt2 else [["q_proj", "v_proj"], ["k_proj", "down_proj", "gate_proj"]]
    every = ["all-linear"]
    if model.config.model_type == "deepseek_v3":
        some, every = [["o_proj"], ["kv_b_proj", "o_proj"], ["kv_a_proj_with_mqa", "kv_b_proj"]], []
    elif hasattr(model.config, "num_experts_per_tok"):
        # Adapters of experts and routers are refused.
        some = [["q_proj", "v_proj"], ["k_proj", "o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]]
        every = []
    config = peft.LoraConfig(
        r=draw.choice([1, 2, 4]), lora_alpha=draw.choice([1, 4, 8]), target_modules=draw.choice([*every, *some]),
        task_type="CAUSAL_LM", fan_in_fan_out=is_gpt2, **variant(of_variant, model.config, is_gpt2),
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def write_documents(path, vocabulary, documents, counted):
    """A file as `girandole tokenize` writes it; of each token, whether it counts for the loss."""
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    tokens = struct.pack(f"<{bounds[-1]}H", *(token for document in documents for token in document))
    bits = bytearray(-(-bounds[-1] // 8))
    for place, counts in enumerate(counts for document in counted for counts in document):
        bits[place // 8] |= counts << place % 8
    parts = [
        ("tokens", "U16", bounds[-1], tokens + bytes(-len(tokens) % 8)),
        ("documents", "U64", len(bounds), struct.pack(f"<{len(bounds)}Q", *bounds)),
    ]
    parts += [] if all(map(all, counted)) else [("counted", "U8", len(bits), bytes(bits))]
    header, end, content = {}, 0, b"".join(data for *_, data in parts)
    for name, dtype, count, data in parts:
        header[name] = {"dtype": dtype, "shape": [len(data) // 2 if name == "tokens" else count], "data_offsets": [end, end + len(data)]}
        end += len(data)
    about = {"format": "girandole-tokens-1", "vocab_size": str(vocabulary), "sha256": hashlib.sha256(content).hexdigest()}
    about = json.dumps({"__metadata__": about, **header}).encode()
    about += b" " * (-len(about) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(about)) + about + content)


def best_fit(parts, length):
    """Rows of parts: the longest first, each into the fullest row with room for it, of several into the one that has been so for longest."""
    rows, room = [], {}
    for part in sorted(parts, key=lambda part: part[0] - part[1]):
        size = part[1] - part[0]
        fullest = min((left for left, queue in room.items() if left >= size and queue), default=None)
        row = room[fullest].pop(0) if fullest else len(rows)
        left = (fullest or length) - size
        rows += [] if fullest else [[]]
        rows[row].append(part)
        room.setdefault(left, []).append(row)
    return [sorted(row) for row in rows]


def parts_of_rows(packing, too_long, bounds, length):
    """Parts of each row, as their first token, the one behind the last, and the one behind the last target's."""
    documents = list(zip(bounds, bounds[1:]))
    if packing == "documents":
        for begin in range(0, bounds[-1] - 1 - (bounds[-1] - 1) % length, length):
            cuts = sorted({begin, begin + length, *(bound for bound in bounds if begin < bound < begin + length)})
            yield [(a, b, b if b in bounds else b + 1) for a, b in zip(cuts, cuts[1:])]
        return
    full, shared = [], []
    for begin, end in documents:
        if end - begin > length and too_long == "drop":
            continue
        rest = begin + (end - begin) // length * length if end - begin > length else begin
        full += [[(first, first + length, min(first + length + 1, end))] for first in range(begin, rest, length)]
        shared += [(rest, end, end)] if rest < end else []
    yield from sorted(full + best_fit(shared, length))


def documents_of(draw, config, packing, too_long, count, length):
    """Documents with prompts that do not count, or without; and `count` rows of them at least: tokens, targets, and lengths."""
    lengths, has_prompts, rows, bounds = [], draw.random() < 0.5, [], [0]
    # Twice as many, since steps without targets are left out.
    while len(rows) < 2 * count:
        lengths.append(draw.choice([1, 1, 2, 3, draw.randint(1, length), draw.randint(1, length), draw.randint(1, 3 * length)]))
        bounds.append(bounds[-1] + lengths[-1])
        if bounds[-1] >= 2 * count * length:
            rows = list(parts_of_rows(packing, too_long, bounds, length))
    documents = [[draw.randrange(config.vocab_size) for _ in range(size)] for size in lengths]
    prompts = [draw.randrange(size) if has_prompts else 0 for size in lengths]
    counted = [[place >= prompt for place in range(size)] for prompt, size in zip(prompts, lengths)]
    tokens = [token for document in documents for token in document]
    flags = [flag for document in counted for flag in document]
    inputs, targets = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), IGNORED)
    sizes = []
    for row, parts in enumerate(rows):
        place = 0
        for begin, end, last in parts:
            inputs[row, place : place + end - begin] = torch.tensor(tokens[begin:end])
            for target in range(begin + 1, last):
                if flags[target]:
                    targets[row, place + target - begin - 1] = tokens[target]
            place += end - begin
        sizes.append([end - begin for begin, end, _ in parts])
    return documents, counted, (inputs, targets, sizes)


def of_documents(config, sizes, length):
    """Arguments of a model for rows of documents: masks and positions. Unused places see themselves alone."""
    whole = [row + [1] * (length - sum(row)) for row in sizes]
    positions = torch.tensor([[place for size in row for place in range(size)] for row in whole])
    documents = torch.tensor([[index for index, size in enumerate(row) for _ in range(size)] for row in whole])
    seen = (documents[:, :, None] == documents[:, None, :]).tril()

    def mask(window):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        own = seen & (distance < window) if window else seen
        return torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)[:, None]

    window = getattr(config, "sliding_window", None)
    by_kind = config.model_type in ("qwen2", "qwen3")
    masks = {"full_attention": mask(None), "sliding_attention": mask(window)} if by_kind else mask(window)
    return {"attention_mask": masks, "position_ids": positions}


def load(folder, in_4_bits=False):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
    )
    own = dict(quantization_config=config, device_map={"": "cpu"}) if in_4_bits else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **own)


def closest_choice(model):
    """A list whose only element becomes the least lead that a chosen expert's share had over one that was not chosen."""
    least = [math.inf]

    def lead(scores, chosen):
        scores = scores.sort(-1, descending=True).values
        if chosen < scores.shape[-1]:
            apart = scores[:, chosen - 1] - scores[:, chosen]
            least[0] = min([least[0], *apart[apart.isfinite()].tolist()])

    def note(router, _, output):
        lead(output[0].detach().float().softmax(-1), output[-1].shape[-1])

    def note_groups(router, _, output):
        scores = output[0].detach().sigmoid() + router.e_score_correction_bias
        groups = scores.unflatten(-1, (router.num_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1)
        lead(best, router.topk_group)
        left_out = best < best.topk(router.topk_group, dim=-1).values[:, -1:]
        lead(groups.masked_fill(left_out[..., None], -math.inf).flatten(1), router.top_k)

    for module in routers(model):
        module.register_forward_hook(note_groups if hasattr(module, "num_group") else note)
    return least


def routers(model):
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def theirs(model, inputs, targets, sizes, rows, lr, decay, clip):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for begin in range(0, len(inputs) - rows + 1, rows):
        own = slice(begin, begin + rows)
        # Both leave out a step in which nothing is to be learned.
        if len(losses) == STEPS or (targets[own] == IGNORED).all():
            continue
        more = of_documents(model.config, sizes[own], inputs.shape[1]) if sizes else {}
        optimizer.zero_grad()
        logits = model(input_ids=inputs[own], use_cache=False, **more).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets[own].flatten(), ignore_index=IGNORED)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(girandole, seed, family, lora, packed, in_4_bits, folder):
    """What is wrong with this seed, what it is, and how close the choice of an expert was."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config = configuration(draw, in_4_bits, family)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
        for router in routers(model):
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.copy_(0.1 * torch.randn_like(router.e_score_correction_bias))
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    if hasattr(config, "num_experts_per_tok"):
        # Saved in 16 bits, other experts would be chosen.
        dtype = torch.float32
    begin, begun, data, out, metrics = (os.path.join(folder, name) for name in ("model", "adapters", "t.safetensors", "out", "m.jsonl"))
    model.to(dtype).save_pretrained(begin, max_shard_size=draw.choice(["10KB", "1GB"]))
    model = load(begin, in_4_bits)
    if lora:
        model = adapters(draw, random.Random(seed + 2_000_000), model, begun)
    model.train()

    axes = layout(draw, config)
    parts = draw.choice([2, 4]) if "pp" in axes else draw.choice([1, 1, 2])
    rows = 2 ** len({"dp", "shard"} & set(axes)) * parts * draw.choice([1, 2])
    if hasattr(config, "num_experts_per_tok"):
        rows *= 2
    length = draw.choice([8, 12, config.max_position_embeddings - 1, config.max_position_embeddings])
    tokens = torch.randint(0, config.vocab_size, (rows * STEPS, length + 1))
    # Apart from the other draws, so that a seed's model is the same either way.
    of_rows = random.Random(seed + 1_000_000)
    packing = of_rows.choice(["documents", "whole"] if packed else [None, "documents", "whole"])
    too_long = of_rows.choice([None, "cut", "drop"]) if packing == "whole" else None
    inputs, targets, sizes = tokens[:, :-1], tokens[:, 1:], []
    if packing:
        documents, counted, (inputs, targets, sizes) = documents_of(of_rows, config, packing, too_long, rows * STEPS, length)
        write_documents(data, config.vocab_size, documents, counted)
    else:
        safetensors.torch.save_file({"tokens": tokens}, data)
    clip, decay, lr = draw.choice([0, 0.5, 1.0]), draw.choice([0.0, 0.1]), draw.choice([1e-3, 3e-3])
    options = {
        "model": begin, "data": data, "out": out, "metrics": metrics, "steps": STEPS, "batch-size": rows, "length": length, "lr": lr,
        "schedule": "constant", "weight-decay": decay, "clip": clip, "accumulate": parts,
    }
    mesh = [f"{axis}=2" for axis in axes]
    mesh += [f"cp={of_rows.choice([2] if len(axes) == 2 else [2, 3, 4])}"] if of_rows.random() < 0.4 else []
    if routers(model) and len(mesh) < 3 and of_rows.random() < 0.6:
        # A step has rows for each rank.
        ranks = of_rows.choice([2, 4])
        mesh += [f"ep={ranks}"] if rows % (ranks * parts * 2 ** len({"dp", "shard"} & set(axes))) == 0 else []
    options |= {"mesh": ",".join(mesh)} if mesh else {}
    options |= {name: value for name, value in [("packing", packing), ("too-long", too_long)] if value}
    options |= {"adapters": begun} if lora else {}
    options |= {"base-bits": 4} if in_4_bits else {}
    options |= {"recompute": draw.choice([1, 2, "selective"])} if draw.random() < 0.4 else {}
    options |= {"pipeline-schedule": draw.choice(["gpipe", "1f1b", "zb-h1"])} if "pp" in axes else {}
    flags = ["--sequence-parallel"] if "tp" in axes and length % 2 == 0 and draw.random() < 0.5 else []
    command = [girandole, "finetune", "--no-shuffle", *flags, *(f"--{name}={value}" for name, value in options.items())]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    about = f"seed {seed}: {config.model_type}, {dtype}: {' '.join(command)}\n{config.to_json_string(use_diff=True)}"
    if run.returncode:
        return run.stderr, about, math.inf
    closest = closest_choice(model)
    lines = map(json.loads, pathlib.Path(metrics).read_text().splitlines())
    mine = [line["loss"] for line in lines if line["event"] == "step"]
    other = theirs(model, inputs, targets, sizes, rows, lr, decay, clip)
    if not len(mine) == len(other) == STEPS or not all(abs(a - b) <= LOSSES for a, b in zip(mine, other)):
        return f"losses {mine}, transformers' {other}", about, closest[0]

    saved = load(begin if lora else out, in_4_bits)
    if lora:
        import peft

        saved = peft.PeftModel.from_pretrained(saved, out)
    with torch.no_grad():
        mine, other = (each.eval()(input_ids=tokens[:2, :-1]).logits for each in (saved, model))
    apart = (mine - other).abs().max().item()
    # What was read in 16 bits is saved so.
    limit = LOGITS if dtype == torch.float32 or lora else ROUNDED
    return (f"logits of what is saved are {apart} apart" if apart > limit else None), about, closest[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/debug/girandole", help="the program")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=50, help="how many seeds")
    parser.add_argument("--family", help="models of this one only, as config.json names it")
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--in-4-bits", action="store_true", help="train adapters on a base in 4 bits, beside bitsandbytes")
    parser.add_argument("--packed", action="store_true", help="rows of documents in every run")
    options = parser.parse_args()
    if not os.access(options.girandole, os.X_OK):
        sys.exit(f"error: --girandole: there is no program {options.girandole}; build it: cargo build -p bin")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    failed, undecided = [], []
    for seed in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory() as folder:
            wrong, about, closest = compare(options.girandole, seed, options.family, options.lora or options.in_4_bits, options.packed, options.in_4_bits, folder)
        if wrong and closest < TIED:
            undecided.append(seed)
        elif wrong:
            failed.append(seed)
            print(f"{about}\n{wrong}", flush=True)
    agree = f"{options.count - len(failed) - len(undecided)} of {options.count} agree"
    print(agree + (f"; not: {failed}" if failed else "") + (f"; experts were tied: {undecided}" if undecided else ""))
    sys.exit(1 if failed else 0)
