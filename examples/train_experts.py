"""Trains the experts of experts/: adapters of four kinds for one base model, as it is served.

    python -m examples.train_experts --base MODEL.gguf --out DIR [--only NAME] [--steps N]

Needs torch, transformers, safetensors, tokenizers and jinja2; made for one large GPU (minutes),
also runs on a CPU (hours). Writes one PEFT directory per expert and DIR/report.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from coterie.models.text.tokenizer import Tokenizer
from coterie.packages.evaluate import judge, score
from examples.expert_data.base import Item
from examples.expert_data.table import EXPERTS, Recipe
from examples.expert_training.base import load_base
from examples.expert_training.batches import Encoded, encode, encode_prompt
from examples.expert_training.loop import Plan, answer, train, validate
from examples.expert_training.modules import Adapted, Shape
from examples.expert_training.saving import save

_BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_VALIDATION = 256
_ANSWER_ROWS = 256


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _arguments(arguments)
    names = args.only or list(EXPERTS)
    if len(names) > 1 and args.jobs > 1:
        _side_by_side(args, names)
    else:
        torch.manual_seed(0)
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        model, tokenizer = load_base(args.base, args.device, dtype)
        for name in names:
            facts = train_one(EXPERTS[name], model, tokenizer, args)
            (args.out / name / "training.json").write_text(json.dumps(facts, indent=1))
    facts = [json.loads((args.out / name / "training.json").read_text()) for name in names]
    if len(names) > 1:
        (args.out / "report.json").write_text(json.dumps(facts, indent=1))
    for row in facts:
        print(f"{row['name']:15} {row['kind']:12} loss {row['loss']:.3f} {row['seconds']:4.0f} s  "
              f"held out: base {row['base']:.3f}, expert {row['expert']:.3f} "
              f"[{row['low']:.3f}, {row['high']:.3f}]  {row['bytes'] / 1e6:.2f} MB")  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=list(EXPERTS))
    parser.add_argument("--steps", type=int, default=0, help="instead of the recipe's")
    parser.add_argument("--rows", type=int, default=64, help="examples per step")
    parser.add_argument("--items", type=int, default=0, help="held-out items to answer; 0 = all")
    parser.add_argument("--jobs", type=int, default=1, help="experts that are trained at once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def _side_by_side(args: argparse.Namespace, names: Sequence[str]) -> None:
    """One process per expert: so small a model leaves a large GPU idle between kernels."""
    command = [sys.executable, "-m", "examples.train_experts", "--base", str(args.base)]
    command += ["--device", args.device, "--steps", str(args.steps), "--rows", str(args.rows)]
    command += ["--items", str(args.items)]
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            out = ["--out", str(args.out), "--only", name]
            running[name] = subprocess.Popen(command + out)
        time.sleep(0.5)
        for name in [name for name, child in running.items() if child.poll() is not None]:
            if running.pop(name).returncode:
                raise SystemExit(f"training {name} failed")


def train_one(
    recipe: Recipe, model: Any, tokenizer: Tokenizer, args: argparse.Namespace
) -> dict[str, Any]:
    began = time.perf_counter()
    rows = encode(tokenizer, recipe.examples())
    held_back, rows = rows[:_VALIDATION], rows[_VALIDATION:]
    items = recipe.held_out()[: args.items or None]
    base = _judged(
        Adapted(model, Shape("lora", targets=()), tokenizer.encode), recipe, items, tokenizer
    )
    plan = Plan(args.steps or recipe.steps, args.rows, recipe.rates[0])
    attempts = []
    for rate in recipe.rates:
        attempts.append(
            _attempt(recipe, model, tokenizer, replace(plan, rate=rate), rows, held_back)
        )
        note(f"{recipe.name}: rate {rate}: validation loss {attempts[-1][1]:.4f}")
        attempts[-1][0].detach()
    adapted, loss, plan = min(attempts, key=lambda item: item[1])
    adapted.attach()
    answers = _judged(adapted, recipe, items, tokenizer, args.out / recipe.name)
    size = save(adapted, args.out / recipe.name, _BASE_NAME)
    adapted.detach()
    result = score(answers)
    return {
        "name": recipe.name, "kind": recipe.shape.kind, "shape": asdict(recipe.shape),
        "examples": len(rows), "steps": plan.steps, "rows": plan.rows, "rate": plan.rate,
        "seed": plan.seed, "loss": loss, "seconds": time.perf_counter() - began, "bytes": size,
        "base": score(base).share, "expert": result.share, "low": result.low, "high": result.high,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    }  # fmt: skip


def _attempt(
    recipe: Recipe,
    model: Any,
    tokenizer: Tokenizer,
    plan: Plan,
    rows: Sequence[Encoded],
    held_back: Sequence[Encoded],
) -> tuple[Adapted, float, Plan]:
    torch.manual_seed(plan.seed)
    adapted = Adapted(model, recipe.shape, lambda text: tokenizer.encode(text, special=False))
    train(adapted, rows, plan, lambda text: note(f"{recipe.name}: {text}"))
    return adapted, validate(adapted, held_back), plan


def _judged(
    adapted: Adapted,
    recipe: Recipe,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    out: Path | None = None,
) -> list[bool]:
    prompts = [encode_prompt(tokenizer, item.prompt) for item in items]
    limit = max(item.max_tokens for item in items)
    texts: list[str] = []
    for at in range(0, len(prompts), _ANSWER_ROWS):
        part = answer(adapted, prompts[at : at + _ANSWER_ROWS], tokenizer.eos_ids[0], limit)
        texts += [tokenizer.decode(ids) for ids in part]
    verdicts = [
        judge(recipe.metric, text, item.expected) for text, item in zip(texts, items, strict=True)
    ]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"right": ok, "answer": text, **item.record()})
            for ok, text, item in zip(verdicts, texts, items, strict=True)
        ]
        (out / "answers.jsonl").write_text("\n".join(lines) + "\n")
    return verdicts


if __name__ == "__main__":
    main()
