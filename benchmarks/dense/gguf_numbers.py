"""The numbers of a GGUF file: Coterie in stored bits, llama.cpp and fp32 on the same file.

    python -m benchmarks.dense.gguf_numbers FILE [FILE ...] [--prompts 50] [--texts 8]
        [--json FILE]

fp32: transformers over the file's values, widened without rounding; of a model with experts our own
fp32 path. Logits are compared at every position of `--texts` questions with llama.cpp's answers to
them. The distance of two rows of logits is the norm of their difference over the norm of the fp32
row, both about their mean; the tolerance is the median of llama.cpp's own distance from fp32. Ours
is told once more with keys and values in fp32 instead of bf16: what the products alone do.

Greedy answers of 64 tokens are compared as far as the first end of turn. Where two answers part, a
near tie is a place where in fp32 neither choice is further behind the best than four times
llama.cpp's typical error of a logit (of two logits, twice each): either program may choose either
token there. Ends with 1 if our distance is over the tolerance or an answer parts elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.dense.cpu import System, worker
from benchmarks.peers.quantised_files import has_experts
from coterie.core.request import Chat, Message
from coterie.models.base import CausalLM, load_model
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.paged_model import prompt_logits
from tests.helpers.serving.greedy_engine import NEW_TOKENS, Oracle, run

QUESTIONS = Path(__file__).parents[2] / "routing_set" / "held_out.jsonl"
CHUNK = 64
# rows that are compared at a time
_ROWS = 64

# token ids -> logits of every position
Logits = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class Distances:
    """Over positions; `divergence` is Kullback-Leibler's, of the probabilities of all tokens."""

    positions: int
    median: float
    p99: float
    largest: float
    # of one logit: the root of the mean square of a row, at the median row; the largest of all
    typical_error: float
    largest_error: float
    mean_divergence: float
    # positions whose most likely token is the same
    same_best: float


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers to a prompt part: what fp32 says about the two tokens."""

    prompt: int
    place: int
    ours: int
    theirs: int
    # logits: of the best two tokens, and of the best over the worse of the two choices
    gap: float
    behind: float
    best: int


def distances(pairs: Sequence[tuple[Tensor, Tensor]]) -> Distances:
    """Of (logits, fp32 logits) of each text."""
    relative, typical, errors, divergence, same = [], [], [], [], []
    for logits, reference in pairs:
        for got, want in zip(logits.split(_ROWS), reference.split(_ROWS), strict=True):
            off, size = (x - x.mean(-1, keepdim=True) for x in (got - want, want))
            relative.append(off.norm(dim=-1) / size.norm(dim=-1))
            typical.append(off.square().mean(-1).sqrt())
            errors.append((got - want).abs().amax(-1))
            log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
            divergence.append((log_p.exp() * (log_p - log_q)).sum(-1))
            same.append((got.argmax(-1) == want.argmax(-1)).float())
    each = torch.cat(relative)
    return Distances(
        positions=len(each),
        median=float(each.median()),
        p99=float(each.quantile(0.99)),
        largest=float(each.max()),
        typical_error=float(torch.cat(typical).median()),
        largest_error=float(torch.cat(errors).max()),
        mean_divergence=float(torch.cat(divergence).mean()),
        same_best=float(torch.cat(same).mean()),
    )


def until_end(answer: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The answer with its first end, without what follows."""
    for place, token in enumerate(answer):
        if token in ends:
            return list(answer[: place + 1])
    return list(answer)


def partings(
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    fp32: Logits,
) -> list[Parting]:
    found = []
    for index, (ids, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(mine, other)) if a != b), None)  # noqa: B905
        if place is None:
            continue
        row = fp32([*ids, *mine[:place]])[-1]
        first, second = row.topk(2).values.tolist()
        chosen = min(float(row[mine[place]]), float(row[other[place]]))
        parting = Parting(
            index,
            place,
            mine[place],
            other[place],
            first - second,
            first - chosen,
            int(row.argmax()),
        )
        found.append(parting)
    return found


def fp32_logits(path: Path) -> Logits:
    if has_experts(path):
        model = load_model(open_checkpoint(path), dtype="fp32")
        return lambda ids: prompt_logits(model, ids, CHUNK)
    oracle = Oracle(path).model

    @torch.inference_mode()
    def of(ids: Sequence[int]) -> Tensor:
        logits: Tensor = oracle(torch.tensor([list(ids)])).logits[0]
        return logits

    return of


def our_logits(model: CausalLM) -> Logits:
    return lambda ids: prompt_logits(model, ids, CHUNK)


def questions(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Evenly from the routing set, as turns of a chat."""
    items = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    chosen = [items[place * len(items) // count] for place in range(count)]
    texts = ["\n\n".join(filter(None, (item["prompt"], item.get("body")))) for item in chosen]
    chats = [Chat((Message("user", text),), may_be_text=True) for text in texts]
    return [tokenizer.encode_prompt(tokenizer.readable(chat)) for chat in chats]


class LlamaCpp:
    def __init__(self, path: Path, threads: int, folder: Path) -> None:
        self._system = System("llama.cpp", "", worker("llamacpp", str(path), "1", str(threads)))
        self._out = folder / "logits.npy"
        self._system.open()

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers: list[list[int]] = self._ask(
            {"op": "greedy", "prompts": [list(ids) for ids in prompts], "tokens": NEW_TOKENS}
        )
        return answers

    def logits(self, ids: Sequence[int]) -> Tensor:
        self._ask({"op": "logits", "ids": list(ids), "path": str(self._out)})
        return torch.from_numpy(np.load(self._out))

    def stop(self) -> None:
        self._system.stop()

    def _ask(self, request: dict[str, Any]) -> Any:
        value = self._system.request(request)
        if value is None:
            raise RuntimeError(f"llama.cpp: {self._system.problem}")
        return value


def compare(path: Path, num_prompts: int, num_texts: int, threads: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(path)
    prompts, ends = questions(tokenizer, num_prompts), tokenizer.eos_ids
    model = load_model(open_checkpoint(path))
    # each alone, as llama.cpp answers; rows of a batch have the same bits
    mine = run(model, path, prompts, prefix_cache=False, max_sequences=8).tokens
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        peer = LlamaCpp(path, threads, Path(folder))
        try:
            others = peer.greedy(prompts)
            texts = [
                [*ids, *answer][: model.spec.max_positions]
                for ids, answer in zip(prompts[:num_texts], others, strict=False)
            ]
            peers = [peer.logits(ids) for ids in texts]
        finally:
            peer.stop()
    ours = [our_logits(model)(ids) for ids in texts]
    model.kv_dtype = torch.float32
    products = [our_logits(model)(ids) for ids in texts]
    fp32 = fp32_logits(path)
    exact = [fp32(ids) for ids in texts]
    found = {
        "coterie to fp32": distances(list(zip(ours, exact, strict=True))),
        "coterie with a cache in fp32 to fp32": distances(list(zip(products, exact, strict=True))),
        "llama.cpp to fp32": distances(list(zip(peers, exact, strict=True))),
        "coterie to llama.cpp": distances(list(zip(ours, peers, strict=True))),
    }
    mine, others = ([until_end(answer, ends) for answer in each] for each in (mine, others))
    parted = partings(prompts, mine, others, fp32)
    tie = 4 * found["llama.cpp to fp32"].typical_error
    return {
        "distances": {name: asdict(distance) for name, distance in found.items()},
        "answers": len(prompts),
        "equal": len(prompts) - len(parted),
        "near_tie": tie,
        "partings": [asdict(parting) for parting in parted],
        "within": found["coterie to fp32"].median <= found["llama.cpp to fp32"].median,
        "all_near_ties": all(parting.behind <= tie for parting in parted),
    }


def table(files: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| file | pair | distance: median | p99 | largest | error of a logit: typical | largest "
        "| divergence | same best token |",
        "|---" * 9 + "|",
    ]
    for name, file in files.items():
        for pair, d in file["distances"].items():
            cells = [f"{d[key]:.2e}" for key in ("median", "p99", "largest")]
            cells += [f"{d[key]:.3f}" for key in ("typical_error", "largest_error")]
            cells.append(f"{d['mean_divergence']:.1e}")
            lines.append(f"| {name} | {pair} | {' | '.join(cells)} | {d['same_best']:.2%} |")
    for name, file in files.items():
        parted = file["partings"]
        lines.append(f"\n{name}: {file['equal']} of {file['answers']} greedy answers are equal")
        if parted:
            ours = sum(p["ours"] == p["best"] for p in parted)
            theirs = sum(p["theirs"] == p["best"] for p in parted)
            behind = max(p["behind"] for p in parted)
            lines.append(
                f"of {len(parted)} that part, fp32 goes on with our token in {ours} and with "
                f"llama.cpp's in {theirs}; the worse choice is at most {behind:.3f} behind the "
                f"best (near tie: {file['near_tie']:.3f})"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, dict[str, Any]] = {}
    for path in args.files:
        found[path.stem] = compare(path, args.prompts, args.texts, args.threads)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0 if all(file["within"] and file["all_near_ties"] for file in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
