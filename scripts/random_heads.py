"""For `random-models.py`: documents with labels and pairs for reward models, and what `transformers` and TRL make of them."""

import json
import pathlib

import tokenizers
import torch
import torch.nn.functional as F
import transformers

TASKS = ("single-label", "multi-label", "regression", "reward")


def head(draw, config, task):
    """Adds a head's fields to a configuration; its last token is that of padding, which no document has."""
    config.num_labels = 1 if task == "reward" else draw.choice([2, 3, 5]) if task != "regression" else draw.choice([1, 3])
    # A reward is a label without a kind.
    config.problem_type = {"single-label": "single_label_classification", "multi-label": "multi_label_classification"}.get(task)
    if task == "regression":
        config.problem_type = "regression"
    config.pad_token_id = config.vocab_size - 1


def write_tokenizer(folder, config):
    """Writes a tokenizer whose tokens are the words t0, t1 and so on."""
    words = {f"t{token}": token for token in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    padding, end = f"t{config.vocab_size - 1}", f"t{config.vocab_size - 2}"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=padding, eos_token=end).save_pretrained(folder)


def examples(draw, config, task, count, length):
    """Documents, each a list of tokens with its label; or pairs of them with a margin."""
    # The last two tokens are padding and end of text.
    document = lambda most: [draw.randrange(config.vocab_size - 2) for _ in range(draw.randint(1, most))]
    label = {
        "single-label": lambda: draw.randrange(config.num_labels),
        "multi-label": lambda: sorted(draw.sample(range(config.num_labels), draw.randint(0, config.num_labels))),
        "regression": lambda: [round(draw.uniform(-2, 2), 3) for _ in range(config.num_labels)],
    }.get(task)
    if label:
        return [(document(length), label()) for _ in range(count)]
    has_margins = draw.random() < 0.5
    # The end of text comes behind each of both; answers that are equal teach nothing, and are refused.
    end, half = [config.vocab_size - 2], length // 2 - 1
    pairs = []
    while len(pairs) < count:
        chosen, rejected, margin = document(half) + end, document(half) + end, draw.choice([0.0, 0.25, 1.5]) if has_margins else 0.0
        pairs += [(chosen, rejected, margin)] if chosen != rejected else []
    return pairs


def write_examples(path, task, examples):
    """Writes a line for each of them."""
    text = lambda tokens: " ".join(f"t{token}" for token in tokens)
    if task == "reward":
        lines = [{"chosen": text(one[:-1]), "rejected": text(other[:-1]), "margin": margin} for one, other, margin in examples]
    else:
        # Numbers of two labels could also be whether each applies.
        own = lambda label: [f"LABEL_{of}" for of in label] if task == "multi-label" else label[0] if isinstance(label, list) and len(label) == 1 else label
        lines = [{"text": text(tokens), "label": own(label)} for tokens, label in examples]
    pathlib.Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def size(task, example):
    """How many places of a row an example takes."""
    return len(example[0]) + (len(example[1]) if task == "reward" else 0)


def loss(model, task, examples):
    """The mean over documents or pairs, each by itself, without padding."""
    scores = lambda tokens: model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    if task == "reward":
        return torch.stack([-F.logsigmoid(scores(one) - scores(other) - margin).squeeze() for one, other, margin in examples]).mean()
    logits = torch.stack([scores(tokens) for tokens, _ in examples])
    labels = [label for _, label in examples]
    if task == "single-label":
        return F.cross_entropy(logits, torch.tensor(labels))
    if task == "multi-label":
        applies = torch.tensor([[float(label in own) for label in range(logits.shape[1])] for own in labels])
        return F.binary_cross_entropy_with_logits(logits, applies)
    return F.mse_loss(logits, torch.tensor(labels))
