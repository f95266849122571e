"""Runs prompts through a real Engine, and through transformers as the oracle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from coterie.core.events import Delta, Failed, Finished
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits, Sampling
from coterie.engine.engine import Engine
from coterie.kernels.cpu.build import native
from coterie.models.base import CausalLM, load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import dense

NEW_TOKENS = 64
# of two logits; machines add in other orders and differ by millionths
CLEAR = 1e-4
GREEDY = Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0)


@dataclass
class Outcome:
    """What a run of the engine gave, by prompt, and what it counted."""

    tokens: list[list[int]]
    cached: list[int]
    stats: dict[str, float] = field(default_factory=dict)


def run(
    model: CausalLM,
    path: Path,
    prompts: Sequence[Sequence[int]],
    *,
    waves: int = 1,
    temperature: float = 0.0,
    **lane: Any,
) -> Outcome:
    """NEW_TOKENS each, `waves` groups one after the other through one engine. Greedy, or drawn at
    this temperature with top-p 0.95 and the prompt's number as its seed."""
    settings = {"num_blocks": 512, "context": model.spec.max_positions, "max_queue": 64, **lane}
    engine = Engine(model, load_tokenizer(path), [LaneConfig(name="m", **settings)])
    outcome = Outcome([[] for _ in prompts], [0] * len(prompts))
    for wave in range(waves):
        for index in range(wave, len(prompts), waves):
            drawn = replace(GREEDY, temperature=temperature, top_p=0.95, seed=index)
            how = drawn if temperature else GREEDY
            assert isinstance(engine.add(_assignment(index, prompts[index], how)), Admitted)
        while engine.has_work():
            _collect(engine, outcome)
    engine.check()
    outcome.stats = engine.stats()
    return outcome


def _assignment(index: int, ids: Sequence[int], sampling: Sampling) -> Assignment:
    return Assignment(
        request_id=str(index),
        lane="m",
        prompt_ids=tuple(ids),
        sampling=sampling,
        limits=Limits(max_tokens=NEW_TOKENS, ignore_eos=True),
        adapters=(),
        session="s",
        tenant="t",
        deadline=None,
        arrived_at=time.monotonic(),
    )


def _collect(engine: Engine, outcome: Outcome) -> None:
    for event in engine.step():
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            outcome.tokens[int(event.request_id)] += event.token_ids
        elif isinstance(event, Finished):
            outcome.cached[int(event.request_id)] = event.usage.cached_tokens


@cache
def model_at(path: Path, backend: str, dtype: str = "fp32") -> CausalLM:
    """`backend` "cpu" is the native path, "reference" what runs with COTERIE_NATIVE=0."""
    if backend == "cpu" and native() is None:
        import pytest  # the device suite runs where it is not installed

        pytest.skip("no compiler on this machine")
    settings = MoeSettings(strategy="persistent", warmup="none", predict="off")
    return load_model(open_checkpoint(path), dtype=dtype, backend=backend, dispatch=settings)


class Oracle:
    """transformers in fp32 over the same weights; remembers what it was asked."""

    def __init__(self, path: Path) -> None:
        import transformers

        checkpoint = open_checkpoint(path)
        model_class = getattr(transformers, checkpoint.config["architectures"][0])
        if path.is_dir():
            self.model = model_class.from_pretrained(path, dtype=torch.float32)
        else:
            self.model = _from_tensors(model_class, checkpoint)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, ids: Sequence[int]) -> list[int]:
        key = tuple(ids)
        if key not in self._known:
            given = torch.tensor([list(ids)])
            out = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._known[key] = out[0, len(ids) :].tolist()
        return self._known[key]

    @torch.no_grad()
    def follow(self, ids: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The greedy answer, as far as `answer` agrees with it, and the token it should go on with.

        One pass over prompt and answer: where every token is the most likely one behind those
        before it, the answer is what greedy decoding without a cache gives.
        """
        logits = self.model(torch.tensor([[*ids, *answer]])).logits[0]
        best: list[int] = logits.argmax(-1)[len(ids) - 1 : -1].tolist()
        for place, (mine, theirs) in enumerate(zip(answer, best, strict=True)):
            if mine != theirs:
                return [*answer[:place], theirs]
        return list(answer)

    @torch.no_grad()
    def telling(self, prompts: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each greedy answer has 16 distinct tokens or more, and never two that are so
        nearly as likely that the rounding of a sum decides (one padded batch)."""
        longest = max(len(ids) for ids in prompts)
        given = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i in prompts])
        out = self.model.generate(
            given,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        first, second = torch.stack(out.logits).topk(2).values.unbind(-1)
        clear = ((first - second).amin(0) >= CLEAR).tolist()
        distinct = [len(set(row[longest:].tolist())) >= 16 for row in out.sequences]
        return [many and apart for many, apart in zip(distinct, clear, strict=True)]


def _from_tensors(model_class: Any, checkpoint: Any) -> Any:
    """A GGUF file has no directory transformers reads: its values, widened, go in by name."""
    config = model_class.config_class(**checkpoint.config)
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    tensors = {name: dense(checkpoint.read(name)) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    # buffers are not in the file: made again outside the meta device
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@cache
def oracle_for(path: Path) -> Oracle:
    return Oracle(path)


@cache
def random_prompts(path: Path, count: int, *, longest: int = 90, seed: int = 1) -> list[list[int]]:
    """Mixed lengths. A prompt whose greedy output has under 16 distinct tokens in 64 is redrawn, as
    loops hide errors, and one whose output hangs on a rounding (`Oracle.telling`)."""
    generator = torch.Generator().manual_seed(seed)
    oracle, found = oracle_for(path), []
    for _ in range(10):
        drawn = [_draw(index, longest, generator) for index in range(count)]
        found += [ids for ids, good in zip(drawn, oracle.telling(drawn), strict=True) if good]
        if len(found) >= count:
            return found[:count]
    raise AssertionError("greedy output loops for almost every prompt drawn")


def _draw(index: int, longest: int, generator: torch.Generator) -> list[int]:
    length = 1 + (index * 37 + int(torch.randint(0, 9, (), generator=generator))) % longest
    ids: list[int] = torch.randint(4, 384, (length,), generator=generator).tolist()
    return ids


def expected(path: Path, prompts: list[list[int]], outcome: Outcome) -> list[list[int]]:
    """What transformers answers; see `Oracle.follow`."""
    pairs = zip(prompts, outcome.tokens, strict=True)
    assert all(len(tokens) == NEW_TOKENS for tokens in outcome.tokens)
    return [oracle_for(path).follow(ids, tokens) for ids, tokens in pairs]
