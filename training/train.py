"""Train the small model that ships with Elastic, on the sources of the Python standard library.

    python training/train.py --out elastic/assets/stdlib-2.6m --minutes 60

Nothing is downloaded: the corpus is the standard library of the interpreter that runs this script. Files are
held out by a hash of their path; the first 16 KiB of each held-out file are the held-out text, written to
`training/heldout.txt` and never trained on. `training/evaluate.py` measures the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import platform
import sys
import sysconfig
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
END = "<|endoftext|>"
HELD_OUT_BYTES = 16 * 1024
NOT_PROSE = {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "__pycache__"}


def corpus() -> tuple[list[str], list[str]]:
    """The texts to train on, and the held-out ones."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_PROSE & set(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if int(hashlib.sha256(str(name).encode()).hexdigest(), 16) % 20:
            train.append(text)
        else:
            held_out.append(text.encode()[:HELD_OUT_BYTES].decode(errors="ignore"))
    return train, held_out


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, padding_side="left"
    )


def build_model(vocab: int, context: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def orthogonalize(grad: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, by the quintic Newton-Schulz iteration of the Muon optimizer."""
    x = grad / (grad.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, in float32 (torch.optim.Muon computes in bfloat16, slow on many CPUs)."""

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def batches(tokens: torch.Tensor, length: int, size: int, generator: torch.Generator):
    while True:
        starts = torch.randint(len(tokens) - length - 1, (size,), generator=generator)
        yield torch.stack([tokens[s : s + length] for s in starts])


def train(model: LlamaForCausalLM, tokens: torch.Tensor, minutes: float, seed: int) -> int:
    """Train until the time is over; the last third of it cools down, on longer windows. Returns tokens seen."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    other = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [Muon(hidden, lr=0.02), torch.optim.AdamW(other, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    base = [[g["lr"] for g in o.param_groups] for o in optimizers]
    generator = torch.Generator().manual_seed(seed)
    start, seen, step = time.monotonic(), 0, 0
    forward = torch.compile(model, dynamic=False)
    short, long = (batches(tokens, n, 4096 // n, generator) for n in (512, 1024))
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1:
        x = next(short if share < 0.75 else long)
        loss = forward(input_ids=x, labels=x).loss
        loss.backward()
        scale = min(1.0, (step + 1) / 50) * min(1.0, (1 - share) / 0.5 + 0.02)
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        seen, step = seen + x.numel(), step + 1
        if step % 20 == 0:
            print(f"{share:6.1%}  step {step}  {seen / 1e6:.2f}M tokens  loss {loss.item():.3f}", flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    texts, held_out = corpus()
    (HERE / "heldout.txt").write_text(END.join(held_out), encoding="utf-8")
    tokenizer = train_tokenizer(texts, args.vocab)
    tokens = torch.tensor([i for t in texts for i in [0, *tokenizer.encode(t, add_special_tokens=False)]])
    model = build_model(args.vocab, context=1024)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters, {len(tokens) / 1e6:.2f}M tokens", file=sys.stderr)
    seen = train(model, tokens, args.minutes, args.seed)
    model.to(torch.float16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    facts = {
        "parameters": model.num_parameters(),
        "corpus": f"CPython {platform.python_version()} standard library, {math.ceil(sum(map(len, texts)) / 1e6)} MB",
        "tokens_seen": seen,
        "minutes": args.minutes,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{torch.get_num_threads()} CPU threads, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "seed": args.seed,
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
