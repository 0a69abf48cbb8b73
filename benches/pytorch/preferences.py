"""DPO of adapters: `girandole prefer` beside TRL's `DPOTrainer`, in turn, on this machine.

    cargo build --release -p bin
    pip install torch transformers peft trl
    python benches/pytorch/preferences.py

SmolLM2's shape of 135 million parameters with random weights and adapters of rank 8 beside all linear layers; a pair has 512 tokens, a byte
each: two answers with one prompt, which are pieces of the guide. Both compute the reference once before they train, begin with the same adapters
(their second factors are 0) and take the same pairs in the same order, f32, AdamW with clipping, one thread; losses, margins and memory are compared.
The first losses are ln 2, later ones are apart as far as the first factors of the adapters are, which each program draws by itself. Speed is that
of all steps but the first one, without the reference; memory is the most that the process held.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from language import SMOLLM2, guide, run

# Steps at the beginning that do not count.
NEW = 1
# Of bytes; an answer ends with a token of its own.
PROMPT, ANSWER = 128, 127


def pairs(folder, count):
    """A file of pairs, with pieces of the guide as prompts and answers."""
    text = pathlib.Path(guide(folder)).read_bytes().decode("ascii", "ignore")
    size = PROMPT + 2 * ANSWER
    lines = []
    for start in range(0, count * size, size):
        piece = text[start : start + size]
        lines.append(json.dumps(dict(prompt=piece[:PROMPT], chosen=piece[PROMPT : PROMPT + ANSWER], rejected=piece[PROMPT + ANSWER :])))
    path = pathlib.Path(folder, "pairs.jsonl")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def theirs(base, data, batch, steps, lr):
    """Seconds of each step of TRL's, its losses and margins, and the most memory in MiB."""
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.began)

    class InOrder(trl.DPOTrainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as out:
        config = trl.DPOConfig(
            output_dir=out, max_steps=steps, per_device_train_batch_size=batch, learning_rate=lr, lr_scheduler_type="constant", logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, bf16=False, fp16=False, weight_decay=0.0, max_grad_norm=1.0, adam_beta2=0.95,
            gradient_checkpointing=False, precompute_ref_log_probs=True, precompute_ref_batch_size=batch, max_length=2048,
        )
        lora = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = Dataset.from_list([json.loads(line) for line in pathlib.Path(data).read_text().splitlines()])
        trainer = InOrder(model=model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=lora, callbacks=[Clock()])
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return times, [log["loss"] for log in logs], [log["rewards/margins"] for log in logs], memory


def ours(girandole, base, data, batch, steps, lr):
    """The same of ours."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        run(
            girandole, "prefer", model=base, data=data, out=os.path.join(folder, "out"), metrics=metrics, batch_size=batch, steps=steps, lr=lr,
            schedule="constant", weight_decay=0, lora_rank=8, length=512, mesh="dp=1",
        )
        lines = [json.loads(line) for line in pathlib.Path(metrics).read_text().splitlines()]
    taken = [line for line in lines if line["event"] == "step"]
    summary = [line for line in lines if line["event"] == "summary"][-1]
    return (
        [line["seconds"] for line in taken], [line["loss"] for line in taken], [line["margin"] for line in taken],
        max(summary["peak_rss_bytes"]) / 2**20,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--girandole", default="target/release/girandole", help="the program (built with --release)")
    parser.add_argument("--batch", type=int, default=4, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--theirs", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lr = 1e-4
    if options.theirs:
        print(json.dumps(theirs(*options.theirs, options.batch, options.steps, lr)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data, base, config = pairs(folder, options.batch * options.steps), os.path.join(folder, "base"), os.path.join(folder, "config")
        os.mkdir(config)
        pathlib.Path(config, "config.json").write_text(json.dumps(SMOLLM2))
        run(
            options.girandole, "pretrain", model=config, tokenizer="bytes", data=os.path.join(folder, "text.txt"), out=base, steps=1, lr=0,
            weight_decay=0, batch_size=1, length=64,
        )
        mine, other = [], []
        for _ in range(options.rounds):
            mine.append(ours(options.girandole, base, data, options.batch, options.steps, lr))
            command = [sys.executable, __file__, f"--batch={options.batch}", f"--steps={options.steps}", "--theirs", base, data]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            other.append(json.loads(printed.splitlines()[-1]))
    print("| | seconds a step | memory | losses | margins |\n| --- | --- | --- | --- | --- |")
    seconds = []
    for name, runs in [("girandole", mine), ("TRL", other)]:
        seconds.append(statistics.median(second for run in runs for second in run[0][NEW:]))
        losses, margins = (" ".join(f"{number:.4f}" for number in of) for of in runs[0][1:3])
        print(f"| {name} | {seconds[-1]:.2f} | {statistics.median(run[3] for run in runs):.0f} MiB | {losses} | {margins} |")
    print(f"\nratio: {seconds[1] / seconds[0]:.2f}")


if __name__ == "__main__":
    main()
