"""Greedy answers of the engine with adapters equal PEFT's: 32 requests over 16 adapters of every
kind and stacks of them, in mixed batches, with preemption and eviction.

The pool, the library and the loader are the real ones; PEFT runs over the same weights in fp32.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from coterie.adapters.files import AdapterLibrary
from coterie.adapters.pool import AdapterPool
from coterie.core.adapters import AdapterSettings
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import AdapterChoice, Admitted, stack_key
from coterie.engine.engine import Engine
from coterie.models.text.tokenizer import load_tokenizer
from coterie.packages.paths import digest_of
from tests.helpers.adapters import peft_adapters
from tests.helpers.adapters.adapter_pool import put_adapter
from tests.helpers.adapters.peft_adapters import PeftOracle, peft_oracle
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.models.toy_model import make_assignment
from tests.helpers.serving.greedy_engine import model_at, oracle_for

# directories that PEFT wrote, and their weights
Parts = tuple[tuple[Path, float], ...]
Question = tuple[tuple[int, ...], Parts]


def sixteen(path: Path, strength: float = 1.0) -> list[Path]:
    """Four of each kind, of different shapes."""
    small = {"target_modules": ["q_proj", "v_proj"]}
    make_adapter = partial(peft_adapters.make_adapter, strength=strength)
    return [
        make_adapter(path, "lora", 1),
        make_adapter(path, "lora", 2, r=16, lora_alpha=16, use_rslora=True),
        make_adapter(path, "lora", 3, r=1, **small),
        make_adapter(path, "lora", 4, r=8, dtype="bfloat16"),
        make_adapter(path, "dora", 5),
        make_adapter(path, "dora", 6, r=8),
        make_adapter(path, "dora", 7, r=2, **small),
        make_adapter(path, "dora", 8, dtype="bfloat16"),
        make_adapter(path, "ia3", 9),
        make_adapter(path, "ia3", 10, target_modules=["q_proj", "o_proj", "up_proj"]),
        make_adapter(path, "ia3", 11, target_modules=["down_proj"]),
        make_adapter(path, "ia3", 12, dtype="bfloat16"),
        make_adapter(path, "soft_prompt", 13),
        make_adapter(path, "soft_prompt", 14, num_virtual_tokens=1),
        make_adapter(path, "soft_prompt", 15, num_virtual_tokens=17),
        make_adapter(path, "soft_prompt", 16, num_virtual_tokens=9),
    ]


def stacks_of(adapters: Sequence[Path]) -> list[Parts]:
    """Every adapter alone, then weighted stacks that PEFT has too, and none at all."""
    a = list(adapters)
    return [
        *(((one, 1.0),) for one in a),
        ((a[0], 0.5),),
        ((a[0], 0.7), (a[1], -0.4)),
        ((a[1], 1.0), (a[2], 0.5), (a[3], 1.5)),
        ((a[4], 1.0), (a[0], 0.6)),
        ((a[0], 0.6), (a[4], 1.0)),
        ((a[5], 0.5), (a[7], 0.5)),
        ((a[8], 1.0), (a[9], 0.5)),
        (),
    ]


class Bench:
    """One model, a library of its adapters, and engines over them."""

    def __init__(self, path: Path, backend: str, root: Path) -> None:
        self.path, self.root = path, root
        self.model = model_at(path, backend)
        self.digests: dict[Path, str] = {}

    def choices(self, parts: Parts) -> tuple[AdapterChoice, ...]:
        for directory, _ in parts:
            if directory not in self.digests:
                digest = digest_of(directory)
                shutil.copytree(directory, self.root / digest)
                self.digests[directory] = digest
        return tuple(AdapterChoice(d.name, self.digests[d], weight) for d, weight in parts)

    @contextmanager
    def pool(self, device_bytes: int) -> Iterator[AdapterPool]:
        settings = AdapterSettings(device_bytes=device_bytes, host_bytes=10**8)
        library = AdapterLibrary(self.root)
        pool = AdapterPool(library, self.model.targets, settings, torch.device("cpu"))
        try:
            yield pool
        finally:
            pool.close()

    def engine(
        self,
        pool: AdapterPool,
        batching: str = "mixed",
        lanes: Sequence[str] = ("lane",),
        **lane: Any,
    ) -> Engine:
        configs = [LaneConfig(name=name, context=512, block_size=4, **lane) for name in lanes]
        tokenizer = load_tokenizer(self.path)
        return Engine(self.model, tokenizer, configs, adapters=pool, batching=batching)

    def answers(
        self,
        engine: Engine,
        work: Sequence[Question],
        count: int,
        lanes: Sequence[str] = ("lane",),
    ) -> list[list[int]]:
        """The requests take turns at the lanes."""
        found: list[list[int]] = [[] for _ in work]
        for number, (ids, parts) in enumerate(work):
            assignment = make_assignment(
                str(number),
                ids,
                max_tokens=count,
                adapters=self.choices(parts),
                lane=lanes[number % len(lanes)],
            )
            verdict = engine.add(assignment)
            assert isinstance(verdict, Admitted), verdict
        while engine.has_work():
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Delta):
                    found[int(event.request_id)] += event.token_ids
            engine.check()
        return found

    def expected(self, work: Sequence[Question], answers: Sequence[list[int]]) -> list[list[int]]:
        """PEFT's greedy answers, as far as ours agree, one pass each: see `PeftOracle.follow`."""
        return [
            follow(self.path, ids, parts, tuple(answer))
            for (ids, parts), answer in zip(work, answers, strict=True)
        ]


@cache
def follow(path: Path, ids: tuple[int, ...], parts: Parts, answer: tuple[int, ...]) -> list[int]:
    return peft_oracle(path).follow(ids, parts, answer)


def questions(stacks: Sequence[Parts], vocab: int, seed: int = 5) -> list[Question]:
    """32, with eight prompts only: equal ones meet on different stacks, and some on the same."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 30, (8,), generator=draw).tolist()
    ids = [tuple(torch.randint(4, vocab, (n,), generator=draw).tolist()) for n in lengths]
    return [(ids[i % 8], stacks[i % len(stacks)]) for i in range(32)]


def make_ready(pool: AdapterPool, stacks: Sequence[tuple[AdapterChoice, ...]]) -> None:
    """Load everything now: what follows does not depend on how fast the loader is."""
    for choices in stacks:
        pool.want(choices)
    for choices in stacks:
        until = time.monotonic() + 60
        while pool.state(stack_key(choices)) != "ready":
            assert time.monotonic() < until
            pool.wait(0.05)


@pytest.fixture(scope="module", params=["cpu", pytest.param("reference", marks=pytest.mark.full)])
def bench(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tiny_checkpoint("llama"), request.param, tmp_path_factory.mktemp("library"))


def test_mixed_batch_equals_peft(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stacks resident; KV is short, so that requests are preempted and come back."""
    work = questions(stacks_of(sixteen(bench.path)), 384)
    mixed: list[int] = []
    forward = bench.model.forward

    def watched(ids: Any, batch: Any, kv: Any, rows: Any) -> Any:
        mixed.append(len(batch.patches))
        return forward(ids, batch, kv, rows)

    monkeypatch.setattr(bench.model, "forward", watched)
    with bench.pool(10**7) as pool:
        make_ready(pool, [bench.choices(parts) for _, parts in work if parts])
        engine = bench.engine(pool, num_blocks=150, max_sequences=32, max_step_tokens=96)
        found = bench.answers(engine, work, 20)
    assert max(mixed) >= 14 and engine.stats()["preemptions"] > 0
    assert engine.stats()["prefix_hits_tokens"] > 0
    assert found == bench.expected(work, found)


def test_lanes_in_one_step_equal_peft(bench: Bench) -> None:
    """Four lanes with rows of all stacks; each has little KV of its own."""
    work = questions(stacks_of(sixteen(bench.path)), 384)
    names = ("a", "b", "c", "d")
    with bench.pool(10**7) as pool:
        make_ready(pool, [bench.choices(parts) for _, parts in work if parts])
        engine = bench.engine(pool, lanes=names, num_blocks=40, max_sequences=8)
        found = bench.answers(engine, work, 20, names)
    assert engine.stats()["preemptions"] > 0
    assert found == bench.expected(work, found)


@pytest.mark.parametrize("batching", ["mixed", "grouped"])
def test_few_seats_equal_peft(bench: Bench, batching: str) -> None:
    """Room for a fifth of the stacks: they are loaded, used and pushed out while others run."""
    work = questions(stacks_of(sixteen(bench.path)), 384)
    with bench.pool(340_000) as pool:
        engine = bench.engine(pool, batching, num_blocks=400, max_sequences=32)
        found = bench.answers(engine, work, 20)
        pool.check()
    assert engine.stats()["adapter_evictions"] > 8
    assert found == bench.expected(work, found)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_default_model_in_full_equals_peft(default_bench: Bench) -> None:
    """32 requests over the 16 adapters and stacks of them, weak enough to leave text as it is."""
    stacks = stacks_of(sixteen(default_bench.path, strength=0.2))
    words = texts(default_bench.path, 8)
    work = [(words[i % 8], stacks[i % len(stacks)]) for i in range(32)]
    with default_bench.pool(5 * 10**8) as pool:
        make_ready(pool, [default_bench.choices(parts) for _, parts in work if parts])
        engine = default_bench.engine(pool, num_blocks=150, max_sequences=32)
        found = default_bench.answers(engine, work, 24)
    assert engine.stats()["preemptions"] > 0
    assert found == default_bench.expected(work, found)


@pytest.fixture(scope="module")
def default_bench(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(default_model_path, "cpu", tmp_path_factory.mktemp("default-library"))


def texts(path: Path, count: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(path)
    words = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 1, 2, 3,")
    return [tuple(tokenizer.encode(words[i % 4] + " and" * (i // 4))) for i in range(count)]


@pytest.mark.timeout(1800)
def test_default_model_equals_peft(default_bench: Bench) -> None:
    """The small slice: one adapter of three kinds and a stack, written by hand to save time."""
    path, root = default_bench.path, default_bench.root
    lora, ia3, soft = (root / digest for digest in write_three(root, default_bench.model.spec))
    default_bench.digests |= {one: one.name for one in (lora, ia3, soft)}
    stacks: list[Parts] = [((lora, 1.0),), ((ia3, 1.0),), ((soft, 1.0),), ((lora, -0.5),)]
    work = list(zip(texts(path, 4), stacks, strict=True))
    with default_bench.pool(10**7) as pool:
        make_ready(pool, [default_bench.choices(parts) for _, parts in work])
        engine = default_bench.engine(pool, num_blocks=14, max_sequences=4)
        found = default_bench.answers(engine, work, 10)
    assert engine.stats()["preemptions"] > 0
    for (ids, parts), answer in zip(work, found, strict=True):
        assert answer == follow_default(path, ids, parts[0], answer)


def write_three(root: Path, spec: Any) -> list[str]:
    """A LoRA, an IA3 and a soft prompt in a library, as PEFT writes them."""
    draw = torch.Generator().manual_seed(3)
    layers = [f"base_model.model.model.layers.{i}" for i in range(spec.num_layers)]
    lora, ia3 = {}, {}
    for layer in layers:
        for part in ("q_proj", "o_proj"):
            name = f"{layer}.self_attn.{part}.lora"
            lora[f"{name}_A.weight"] = torch.randn(8, spec.hidden, generator=draw) * 0.05
            lora[f"{name}_B.weight"] = torch.randn(spec.hidden, 8, generator=draw) * 0.05
        width = spec.num_kv_heads * spec.head_dim
        ia3[f"{layer}.self_attn.v_proj.ia3_l"] = 1 + 0.1 * torch.randn(width, 1, generator=draw)
    soft = {"prompt_embeddings": torch.randn(7, spec.hidden, generator=draw) * 0.1}
    same = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "default"}
    return [
        put_adapter(
            root,
            same | {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
            | {"target_modules": ["q_proj", "o_proj"]},
            save(lora),
            "lora",
        ),
        put_adapter(
            root,
            same | {"peft_type": "IA3", "target_modules": ["v_proj"], "feedforward_modules": []},
            save(ia3),
            "ia3",
        ),
        put_adapter(
            root,
            same | {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 7}
            | {"token_dim": spec.hidden, "num_layers": spec.num_layers},
            save(soft),
            "soft",
        ),
    ]  # fmt: skip


def follow_default(
    path: Path, ids: Sequence[int], part: tuple[Path, float], answer: Sequence[int]
) -> list[int]:
    """`PeftOracle.follow` over the model that the other tests of the default model have loaded."""
    oracle = PeftOracle.__new__(PeftOracle)
    oracle.path, oracle._model = path, oracle_for(path).model
    return oracle.follow(ids, (part,), answer)
