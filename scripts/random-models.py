#!/usr/bin/env python3
"""Random models in random layouts: `girandole finetune` beside transformers (and peft) with PyTorch.

    cargo build -p bin
    pip install torch transformers peft
    scripts/random-models.py --count 50           # all weights
    scripts/random-models.py --count 50 --lora    # adapters, of any variant
    scripts/random-models.py --count 50 --packed  # rows of documents in every run
    pip install bitsandbytes accelerate
    scripts/random-models.py --count 50 --in-4-bits  # adapters on a base in 4 bits
    scripts/random-models.py --count 50 --in-8-bits  # and in 8 bits
    scripts/random-models.py --count 50 --heads   # heads for labels and rewards; with --lora, too

Each seed draws a family, sizes, windows, rotary scaling, biases, ties, files of some dtype, rows or documents and how they are packed, a layout
of at most 16 ranks, groups that average rarely (`far`), AdamW or Muon, accumulation, recomputation, schedule and clipping. transformers gets packed rows with a mask of each document's own tokens,
and positions that begin with each document. Both take the same steps from the same folder. Losses must agree within 1e-4, and what is saved must have the other's
logits when transformers loads it. A model whose choice of experts is nearly tied
in some step, and whose losses then differ, is listed apart. A seed that fails is printed with its command and configuration, and taken again by `--first SEED --count 1`.
"""

import argparse
import copy
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

import random_heads

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


def configuration(draw, bits, only):
    """A configuration that girandole supports, of one family only if it is named."""
    in_4_bits = bits == 4
    drawn = draw.choice(["llama", "llama", "mistral", "qwen2", "qwen3", "gpt2"] + (["mixtral", "qwen2_moe", "qwen3_moe"] + ([] if in_4_bits else ["deepseek_v3"])))
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
        common |= dict(num_experts=several, moe_intermediate_size=128 if in_4_bits else draw.choice([12, 20]), norm_topk_prob=draw.random() < 0.5,
                       decoder_sparse_step=draw.choice([1, 1, 2]), mlp_only_layers=draw.choice([[], [0], [1]]))
        if family == "qwen2_moe":
            return transformers.Qwen2MoeConfig(**common, shared_expert_intermediate_size=128 if in_4_bits else draw.choice([12, 28]))
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


def variant(draw, config, is_gpt2, task):
    """rsLoRA, DoRA, ranks and alphas by pattern, modules trained whole: some of them, or none."""
    some = {}
    if draw.random() < 0.4:
        some["use_rslora"] = True
    if draw.random() < 0.5:
        some["use_dora"] = True
    # With every choice of targets they match a layer with an adapter.
    one = r"(o|kv_b)_proj" if config.model_type == "deepseek_v3" else r"[qk]_proj"
    ends = [r"c_(attn|proj)"] if is_gpt2 else [one, rf"layers\.1\..*{one}"]
    if draw.random() < 0.4:
        some["rank_pattern"] = {draw.choice(ends): draw.choice([1, 3, 5])}
    if draw.random() < 0.4:
        some["alpha_pattern"] = {draw.choice(ends): draw.choice([2, 6])}
    if draw.random() < 0.4 and not task:
        embedding = "wte" if is_gpt2 else "embed_tokens"
        whole = ["lm_head"] if config.tie_word_embeddings else draw.choice([[embedding], ["lm_head"], [embedding, "lm_head"]])
        some |= {"modules_to_save": whole, "ensure_weight_tying": config.tie_word_embeddings}
    return some


def adapters(draw, of_variant, model, folder, task):
    import peft

    is_gpt2 = model.config.model_type == "gpt2"
    some = [["c_attn"], ["c_proj", "c_fc"]] if is_gpt2 else [["q_proj", "v_proj"], ["k_proj", "down_proj", "gate_proj"]]
    every = ["all-linear"]
    if model.config.model_type == "deepseek_v3":
        some, every = [["o_proj"], ["kv_b_proj", "o_proj"], ["kv_a_proj_with_mqa", "kv_b_proj"]], []
    elif hasattr(model.config, "num_experts_per_tok"):
        # Adapters of routers are refused.
        some = [["q_proj", "v_proj"], ["k_proj", "o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]]
        every = []
    rank, alpha, targets = draw.choice([1, 2, 4]), draw.choice([1, 4, 8]), draw.choice([*every, *some])
    others = variant(of_variant, model.config, is_gpt2, task)
    if routers(model) and of_variant.random() < 0.6:
        # Of experts, which have no magnitudes.
        weights = ["experts.gate_up_proj", "experts.down_proj"]
        others |= {"target_parameters": of_variant.choice([weights, weights, weights[:1], weights[1:]]), "use_dora": False}
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="SEQ_CLS" if task else "CAUSAL_LM", fan_in_fan_out=is_gpt2, **others,
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


def load(folder, bits=None, task=None):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
    )
    own = dict(quantization_config=config, device_map={"": "cpu"}) if bits == 4 else {}
    of = transformers.AutoModelForSequenceClassification if task else transformers.AutoModelForCausalLM
    model = of.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **own)
    if bits == 4:
        of_experts(model, in_nf4)
    return in_8_bits(model) if bits == 8 else model


def of_experts(model, of):
    """Replaces the weights of experts, which bitsandbytes leaves as they are, by those of this function."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts") and hasattr(module, "gate_up_proj"):
            for number, (inner, last) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data)):
                gate, up = inner.chunk(2)
                module.gate_up_proj.data[number], module.down_proj.data[number] = torch.cat([of(gate), of(up)]), of(last)


def in_nf4(weight):
    from bitsandbytes import functional

    return functional.dequantize_4bit(*functional.quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True))


def rounded_rows(weight):
    weight = weight.half().float()
    most = weight.abs().amax(1, keepdim=True)
    codes = torch.where(most > 0, weight * (127 / most), 0.0).round()
    return codes * (most * 7.874016e-3)


def in_8_bits(model):
    """Rounds the blocks' linear layers to what bitsandbytes' `Linear8bitLt` keeps; its products also round activations."""
    of_experts(model, rounded_rows)
    for name, module in model.named_modules():
        is_transposed = type(module).__name__ == "Conv1D"
        if not (is_transposed or isinstance(module, torch.nn.Linear)) or not any(part.isdigit() for part in name.split(".")):
            continue
        rounded = rounded_rows((module.weight.T if is_transposed else module.weight).data)
        module.weight.data = (rounded.T if is_transposed else rounded).contiguous()
    return model


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


class Averages:
    """Groups of ranks that each train a model, and average what they have changed: the outer step of `far`."""

    def __init__(self, models, every, fragments, lr, momentum):
        self.trained = [[(name, own) for name, own in model.named_parameters() if own.requires_grad] for model in models]
        self.every, self.fragments, self.lr, self.momentum = every, fragments, lr, momentum
        self.start = [own.detach().clone() for _, own in self.trained[0]]
        self.velocity = [torch.zeros_like(own) for own in self.start]

    def fragment(self, name):
        """That of a parameter's layer, or by the FNV hash of its name."""
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if layer is None:
            layer = 2166136261
            for byte in name.encode():
                layer = (layer ^ byte) * 16777619 % 2**32
        return layer % self.fragments

    def end_step(self, step):
        """After a step, counted from 1. All groups have as many targets."""
        for place, (name, _) in enumerate(self.trained[0]):
            offset = self.fragment(name) * self.every // self.fragments
            if step != STEPS and (step < offset or (step - offset) % self.every):
                continue
            own, start, velocity = [of[place][1].data for of in self.trained], self.start[place], self.velocity[place]
            mean = torch.stack([start - of for of in own]).mean(0)
            velocity.mul_(self.momentum).add_(mean)
            start.sub_(self.lr * (mean + self.momentum * velocity))
            for of in own:
                of.copy_(start)


def newton_schulz(matrix, coefficients, steps, eps):
    """torch.optim.Muon's, in f32 in place of bf16."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Both:
    """torch.optim.Muon for the matrices of hidden layers, and AdamW for all else."""

    def __init__(self, model, lr, decay, muon):
        named = [(name, own) for name, own in model.named_parameters() if own.requires_grad]
        of_router = {id(own) for module in routers(model) for own in module.parameters()}
        no_layer = {id(own) for module in model.modules() if isinstance(module, torch.nn.Embedding) for own in module.parameters()}
        no_layer |= {id(own) for name, own in named if name.split(".")[0] in ("lm_head", "score") or "shared_expert_gate" in name}
        hidden = [own for _, own in named if own.dim() > 1 and id(own) not in of_router | no_layer]
        # transformers joins experts, and each one's first two matrices.
        self.views = [(torch.nn.Parameter(view.data), own, place) for own in hidden for view, place in self.matrices(own)]
        others = [own for _, own in named if all(own is not other for other in hidden)]
        self.all = [torch.optim.Muon([view for view, *_ in self.views], lr=lr, weight_decay=decay, momentum=muon["momentum"], adjust_lr_fn=muon["adjust-lr"]),
                    adamw(others, muon["adamw-lr"], decay)]
        self.parameters = [own for _, own in named]

    @staticmethod
    def matrices(own):
        if own.dim() == 2:
            return [(own, ())]
        half = own.shape[1] // 2
        # Rows of the first two matrices, (experts, 2 * width, hidden), or the last one.
        parts = [slice(None)] if not own.is_joined else [slice(0, half), slice(half, None)]
        return [(own[expert, part], (expert, part)) for expert in range(own.shape[0]) for part in parts]

    def zero_grad(self):
        for own in self.parameters:
            own.grad = None

    def step(self):
        for view, own, place in self.views:
            view.grad = own.grad[place].clone()
        for optimizer in self.all:
            optimizer.step()


def adamw(trained, lr, decay):
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95), eps=1e-8)


def optimizer_of(model, lr, decay, muon):
    if not muon:
        return adamw([parameter for parameter in model.parameters() if parameter.requires_grad], lr, decay)
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    for name, own in model.named_parameters():
        own.is_joined = name.endswith("gate_up_proj")
    return Both(model, lr, decay, muon)


def theirs(model, loss_of, count, rows, settings, far):
    """Losses of `STEPS` steps on `rows` of `count` rows, of which `loss_of` gives the loss, or none if nothing is to be learned."""
    lr, decay, clip, muon = settings
    models = [model] + [copy.deepcopy(model) for _ in range(far["groups"] - 1 if far else 0)]
    averages = Averages(models, far["every"], far["fragments"], far["lr"], far["momentum"]) if far else None
    optimizers = [optimizer_of(own, lr, decay, muon) for own in models]
    losses = []
    for begin in range(0, count - rows + 1, rows):
        if len(losses) == STEPS:
            break
        for number, (own, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            loss = loss_of(own, range(begin + number, begin + rows, len(models)))
            # Both leave out a step in which nothing is to be learned.
            if loss is None:
                continue
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_([of for of in own.parameters() if of.requires_grad], clip)
            optimizer.step()
            losses += [loss.item()] if number == 0 else []
        if averages:
            averages.end_step(len(losses))
    return losses


def loss_of_rows(inputs, targets, sizes):
    def loss(model, rows):
        own = list(rows)
        if (targets[own] == IGNORED).all():
            return None
        more = of_documents(model.config, [sizes[row] for row in own], inputs.shape[1]) if sizes else {}
        logits = model(input_ids=inputs[own], use_cache=False, **more).logits
        return F.cross_entropy(logits.flatten(0, 1), targets[own].flatten(), ignore_index=IGNORED)

    return loss


def averaging(draw, config, lora):
    """How groups of `far` average, or none."""
    if draw.random() > 0.25:
        return None
    # Names of adapters, and of GPT-2's parameters, are others here, and so are fragments.
    fragments = 1 if lora or config.model_type == "gpt2" else draw.choice([1, 1, 2])
    every = draw.choice([2, 3]) if fragments > 1 else draw.choice([1, 2, 3])
    return {"groups": draw.choice([2, 2, 3]), "every": every, "fragments": fragments, "lr": draw.choice([0.7, 1.0]), "momentum": draw.choice([0.0, 0.9])}


def muon_of(draw, config):
    """Muon's options, or none for AdamW."""
    if draw.random() > 0.2:
        return None
    # GPT-2's matrices are transposed in transformers, where one of the two would have another rate.
    adjust = "match_rms_adamw" if config.model_type == "gpt2" else draw.choice(["match_rms_adamw", "original", "spectral_unclamped"])
    return {"adjust-lr": adjust, "momentum": draw.choice([0.9, 0.95]), "adamw-lr": draw.choice([1e-3, 2e-3])}


def head_data(draw, config, task, rows, folder, data, length):
    """Writes documents with labels; returns the loss of some rows of them, and the number of rows."""
    examples, rows_of = [], []
    while len(rows_of) < rows * STEPS:
        examples += random_heads.examples(draw, config, task, 4, length)
        bounds = [0]
        for example in examples:
            bounds.append(bounds[-1] + random_heads.size(task, example))
        rows_of = sorted(best_fit(list(zip(bounds, bounds[1:])), length))
    random_heads.write_examples(data, task, examples)
    random_heads.write_tokenizer(folder, config)
    number = {begin: place for place, begin in enumerate(bounds)}
    of_rows = lambda own: [examples[number[begin]] for row in own for begin, _ in rows_of[row]]
    return lambda model, own: random_heads.loss(model, task, of_rows(own)), len(rows_of)


def begin(draw, seed, options, folder, task):
    """Draws a model and saves it, with adapters if there are to be some; returns it as both read it, and the dtype of its files."""
    config = configuration(draw, options.bits, options.family)
    if task:
        random_heads.head(random.Random(seed + 5_000_000), config, task)
    of = transformers.AutoModelForSequenceClassification if task else transformers.AutoModelForCausalLM
    model = of.from_config(config, attn_implementation="eager", dtype=torch.float32)
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
    model.to(dtype).save_pretrained(folder("model"), max_shard_size=draw.choice(["10KB", "1GB"]))
    model = load(folder("model"), options.bits, task)
    if options.lora:
        model = adapters(draw, random.Random(seed + 2_000_000), model, folder("adapters"), task)
    model.train()
    return model, dtype


def compare(seed, options, folder):
    """What is wrong with this seed, what it is, and how close the choice of an expert was."""
    draw, path = random.Random(seed), lambda name: os.path.join(folder, name)
    torch.manual_seed(seed)
    task = random.Random(seed + 4_000_000).choice(random_heads.TASKS) if options.heads else None
    model, dtype = begin(draw, seed, options, path, task)
    config, of_far = model.config, random.Random(seed + 3_000_000)
    far = averaging(of_far, config, options.lora)
    axes = layout(draw, config)
    parts = draw.choice([2, 4]) if "pp" in axes else draw.choice([1, 1, 2])
    rows = 2 ** len({"dp", "shard"} & set(axes)) * parts * draw.choice([1, 2])
    if hasattr(config, "num_experts_per_tok"):
        rows *= 2
    length = draw.choice([8, 12, config.max_position_embeddings - 1, config.max_position_embeddings])
    # Apart from the other draws, so that a seed's model is the same either way.
    of_rows = random.Random(seed + 1_000_000)
    packing = None if task else of_rows.choice(["documents", "whole"] if options.packed else [None, "documents", "whole"])
    # Groups have different numbers of documents and targets, which weigh in an average.
    far = None if packing or task else far
    rows *= far["groups"] if far else 1
    tokens = torch.randint(0, config.vocab_size, (rows * STEPS, length + 1))
    too_long = of_rows.choice([None, "cut", "drop"]) if packing == "whole" else None
    data, loss_of, count = path("data.jsonl" if task else "t.safetensors"), loss_of_rows(tokens[:, :-1], tokens[:, 1:], []), len(tokens)
    if task:
        loss_of, count = head_data(of_rows, config, task, rows, path("model"), data, length)
    elif packing:
        documents, counted, targeted = documents_of(of_rows, config, packing, too_long, rows * STEPS, length)
        write_documents(data, config.vocab_size, documents, counted)
        loss_of, count = loss_of_rows(*targeted), len(targeted[0])
    else:
        safetensors.torch.save_file({"tokens": tokens}, data)
    muon = None if options.lora else muon_of(of_far, config)
    clip, decay, lr = draw.choice([0, 0.5, 1.0]), draw.choice([0.0, 0.1]), draw.choice([1e-3, 3e-3])
    given = {
        "model": path("model"), "data": data, "out": path("out"), "metrics": path("m.jsonl"), "steps": STEPS, "batch-size": rows, "length": length, "lr": lr,
        "schedule": "constant", "weight-decay": decay, "clip": clip, "accumulate": parts,
    }
    mesh = [f"{axis}=2" for axis in axes]
    mesh += [f"cp={of_rows.choice([2] if len(axes) == 2 else [2, 3, 4])}"] if of_rows.random() < 0.4 else []
    if routers(model) and len(mesh) < 3 and of_rows.random() < 0.6:
        # A step has rows for each rank.
        ranks = of_rows.choice([2, 4])
        mesh += [f"ep={ranks}"] if rows % (ranks * parts * 2 ** len({"dp", "shard"} & set(axes)) * (far["groups"] if far else 1)) == 0 else []
    mesh += [f"far={far['groups']}"] if far else []
    given |= {"mesh": ",".join(mesh)} if mesh else {}
    given |= {f"far-{name}": far[name] for name in ("every", "fragments", "lr", "momentum")} if far else {}
    given |= {name: value for name, value in [("packing", packing), ("too-long", too_long)] if value}
    given |= {"task": task} if task else {}
    given |= {"optimizer": "muon", **muon} if muon else {}
    given |= {"adapters": path("adapters")} if options.lora else {}
    given |= {"base-bits": options.bits} if options.bits else {}
    given |= {"recompute": draw.choice([1, 2, "selective"])} if draw.random() < 0.4 else {}
    given |= {"pipeline-schedule": draw.choice(["gpipe", "1f1b", "zb-h1"])} if "pp" in axes else {}
    flags = ["--sequence-parallel"] if "tp" in axes and length % 2 == 0 and draw.random() < 0.5 else []
    command = [options.girandole, "finetune", "--no-shuffle", *flags, *(f"--{name}={value}" for name, value in given.items())]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    about = f"seed {seed}: {config.model_type}, {dtype}: {' '.join(command)}\n{config.to_json_string(use_diff=True)}"
    if run.returncode:
        return run.stderr, about, math.inf
    closest = closest_choice(model)
    lines = map(json.loads, pathlib.Path(path("m.jsonl")).read_text().splitlines())
    mine = [line["loss"] for line in lines if line["event"] == "step"]
    other = theirs(model, loss_of, count, rows, (lr, decay, clip, muon), far)
    if not len(mine) == len(other) == STEPS or not all(abs(a - b) <= LOSSES for a, b in zip(mine, other)):
        return f"losses {mine}, transformers' {other}", about, closest[0]

    saved = load(path("model" if options.lora else "out"), options.bits, task)
    if options.lora:
        import peft

        saved = peft.PeftModel.from_pretrained(saved, path("out"))
    # Behind padding a head takes another token.
    shown = tokens[:2, :-1] % (config.vocab_size - 1 if task else config.vocab_size)
    with torch.no_grad():
        mine, other = (each.eval()(input_ids=shown).logits for each in (saved, model))
    apart = (mine - other).abs().max().item()
    # What was read in 16 bits is saved so.
    limit = LOGITS if dtype == torch.float32 or options.lora else ROUNDED
    return (f"logits of what is saved are {apart} apart" if apart > limit else None), about, closest[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/debug/girandole", help="the program")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=50, help="how many seeds")
    parser.add_argument("--family", help="models of this one only, as config.json names it")
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--in-4-bits", action="store_true", help="train adapters on a base in 4 bits, beside bitsandbytes")
    parser.add_argument("--in-8-bits", action="store_true", help="train adapters on a base in 8 bits")
    parser.add_argument("--heads", action="store_true", help="heads for labels and rewards")
    parser.add_argument("--packed", action="store_true", help="rows of documents in every run")
    options = parser.parse_args()
    options.bits = 4 if options.in_4_bits else 8 if options.in_8_bits else None
    options.lora = options.lora or options.bits is not None
    if not os.access(options.girandole, os.X_OK):
        sys.exit(f"error: --girandole: there is no program {options.girandole}; build it: cargo build -p bin")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    failed, undecided = [], []
    for seed in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory() as folder:
            wrong, about, closest = compare(seed, options, folder)
        if wrong and closest < TIED:
            undecided.append(seed)
        elif wrong:
            failed.append(seed)
            print(f"{about}\n{wrong}", flush=True)
    agree = f"{options.count - len(failed) - len(undecided)} of {options.count} agree"
    print(agree + (f"; not: {failed}" if failed else "") + (f"; experts were tied: {undecided}" if undecided else ""))
    sys.exit(1 if failed else 0)
