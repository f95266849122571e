"""A KV-faithful toy model: its cache holds the very token ids and positions written to each slot.

Logits of a row are drawn from a hash of the chain read back through the block table, so any wrong
reuse, early free, missed copy or bad slot changes the next token. `true_output` computes the same
chain without any engine. A stack of adapters leaves its mark in every row that it is applied to,
also in the cache; `ToyAdapters` overwrites what it evicts, as a pool does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import CoterieError, NotFound, WeightsError
from coterie.core.lane import LaneConfig
from coterie.core.plan import AdapterChoice, Assignment, stack_key
from coterie.core.request import Limits, Sampling
from coterie.engine.draw import uniform
from coterie.engine.engine import Engine
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.patch import Patch, PatchStack
from coterie.models.build.cuda_graph import Compute

VOCAB = 48
EOS = 0
# the last two ids are a two-byte character cut in half
HALVES = (VOCAB - 2, VOCAB - 1)
# where the toy's stacks have their mark
SITE = (0, "q")


def chain_logits(tokens: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    data = np.array([*tokens, *positions], dtype=np.int64).tobytes()
    words = b"".join(
        blake2b(data, digest_size=64, salt=bytes([part])).digest()
        for part in range(VOCAB * 2 // 64 + 1)
    )
    raw = np.frombuffer(words, dtype=np.uint16)[:VOCAB].astype(np.float32)
    return raw / np.float32(65536) * np.float32(8) - np.float32(4)


@dataclass(frozen=True)
class ToySpec:
    vocab: int = VOCAB
    num_layers: int = 2
    max_positions: int = 4096
    eos_ids: tuple[int, ...] = (EOS,)


class ToyModel:
    """Layer 0 holds token ids, layer 1 positions; both are read back and must agree."""

    def __init__(self) -> None:
        self.spec = ToySpec()
        self.dtype = "fp32"
        self.device = torch.device("cpu")
        self.kv_dtype = torch.int64
        self.weight_bytes = 0
        self.experts = self.memory_trade = None
        self.is_captured, self.is_loading = True, False
        self.fail_next = False
        self.num_rows = 0

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (2, num_blocks, 1, block_size, 1)

    def new_kv(self, num_blocks: int, block_size: int) -> list[Tensor]:
        shape = self.kv_shape(num_blocks, block_size)
        return [torch.zeros(shape, dtype=self.kv_dtype) for _ in range(self.spec.num_layers)]

    def launched_usage(self) -> None:
        return None

    def take_usage(self) -> None:
        """There are no experts."""

    def prepare(self, *_: Any) -> None:
        """There is nothing to capture."""

    def kv_bytes_per_token(self) -> int:
        return 32

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], logits_rows: Tensor
    ) -> Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy was told to fail")
        _check_batch(token_ids, batch, kv)
        self.num_rows += len(token_ids)
        tokens, positions = (layer[0].view(-1) for layer in kv)
        embedded, marks = _apply_stacks(token_ids, batch)
        tokens[batch.slots] = embedded
        positions[batch.slots] = batch.positions + marks
        starts = batch.query_starts.tolist()
        rows = []
        for row in logits_rows.tolist():
            owner = next(s for s in range(len(starts) - 1) if starts[s] <= row < starts[s + 1])
            length = int(batch.positions[row]) + 1
            index = torch.arange(length)
            blocks = batch.block_tables[owner].long()[index // batch.block_size]
            slots = blocks * batch.block_size + index % batch.block_size
            rows.append(chain_logits(tokens[slots].tolist(), positions[slots].tolist()))
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB)


def padded_forward(model: ToyModel) -> Compute:
    """The toy as captured steps need it: rows behind the last sequence are padding."""

    def compute(
        token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> tuple[Tensor, None]:
        live = int((batch.slots >= 0).sum())
        assert not batch.context_lens[live:].any()
        logits = torch.zeros(len(token_ids), VOCAB)
        if live:
            own = AttentionBatch(
                batch.positions[:live],
                batch.slots[:live],
                batch.query_starts[: live + 1],
                batch.context_lens[:live],
                batch.block_tables[:live],
                batch.block_size,
                phase="decode",
            )
            logits[:live] = model.forward(token_ids[:live], own, kv, rows[:live])
        return logits, None

    return compute


def _apply_stacks(token_ids: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Token ids with soft tokens replaced by their vectors, and the mark of each row's stack."""
    embedded, marks = token_ids.clone(), torch.zeros_like(token_ids)
    for first, last, stack in batch.patches:
        mark = stack.patches[SITE].shift
        assert mark is not None
        marks[first:last] = mark
        soft = (embedded[first:last] >= VOCAB).nonzero().squeeze(1) + first
        if len(soft):
            assert stack.soft is not None
            embedded[soft] = stack.soft[embedded[soft] - VOCAB, 0]
    assert int((embedded < 0).sum()) == 0, "a soft token without its stack"
    return embedded, marks


def _check_batch(token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor]) -> None:
    """The contract of AttentionBatch, to the letter."""
    starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    assert batch.query_starts.dtype == batch.context_lens.dtype == torch.int32
    assert batch.block_tables.dtype == torch.int32
    assert batch.positions.dtype == batch.slots.dtype == token_ids.dtype == torch.int64
    assert len(token_ids) == len(batch.positions) == len(batch.slots) == starts[-1]
    assert len(set(batch.slots.tolist())) == len(batch.slots), "two rows write one slot"
    bounds = [0, *(bound for part in batch.patches for bound in part[:2]), len(token_ids)]
    assert bounds == sorted(bounds), "segments overlap or are out of order"
    assert set(bounds) <= set(starts), "a segment cuts a sequence"
    assert len({part.stack.key for part in batch.patches}) == len(batch.patches)
    for s, length in enumerate(lens):
        count = starts[s + 1] - starts[s]
        assert count >= 1
        expected = list(range(length - count, length))
        assert batch.positions[starts[s] : starts[s + 1]].tolist() == expected
        used = -(-length // batch.block_size)
        assert used <= batch.block_tables.shape[1]


class ToyTokenizer:
    """One printable character per token; the two last ids are halves of 'é'; 0 is special."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    bos_id = None

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == EOS:
            return b"</s>"
        if token_id in HALVES:
            return "é".encode()[token_id - HALVES[0] : token_id - HALVES[0] + 1]
        return chr(ord("A") + token_id).encode()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(character) - ord("A") for character in text]

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def toy_mark(adapters: Sequence[AdapterChoice]) -> int:
    """What a stack adds to each position: above any position there is."""
    return int(stack_key(adapters)[:6], 16) << 16 if adapters else 0


def toy_soft(adapters: Sequence[AdapterChoice]) -> list[int]:
    """The vectors of a stack's soft tokens. A digest "x:3" has three."""
    count = sum(int(one.digest.partition(":")[2] or 0) for one in adapters)
    return [toy_mark(adapters) + 1000 + i for i in range(count)]


@dataclass(frozen=True)
class ToyFacts:
    key: str
    num_virtual_tokens: int


class ToyAdapters:
    """A pool of `num_slots` stacks, without threads: `tick` is the loader's moment.

    As in the real one, a stack that was brought in is spared until it was taken, for HOLD ticks.
    Digests that begin with "bad" cannot be loaded, with "none" are not known. A slot's memory is
    written over when another stack comes, whoever still reads it.
    """

    HOLD = 6

    def __init__(self, num_slots: int, load_ticks: int = 0) -> None:
        self.load_ticks = load_ticks
        self.now = 0
        # key -> choices and the tick at which they are on the host, in the order they were wanted
        self._wanted: dict[str, tuple[Sequence[AdapterChoice], int]] = {}
        self._known: dict[str, Sequence[AdapterChoice]] = {}
        self._marks = [torch.zeros((), dtype=torch.int64) for _ in range(num_slots)]
        self._softs = [torch.full((64, 1), -1, dtype=torch.int64) for _ in range(num_slots)]
        # by slot, least recently used first
        self._resident: dict[int, str] = {}
        # key -> when it was brought in, until it is taken
        self._new: dict[str, int] = {}
        self.users: dict[str, int] = {}
        self.num_evictions = 0

    def describe(self, adapters: Sequence[AdapterChoice]) -> ToyFacts:
        for one in adapters:
            if one.digest.startswith("none"):
                raise NotFound(f"no adapter {one.name}")
        return ToyFacts(stack_key(adapters), len(toy_soft(adapters)))

    def want(self, adapters: Sequence[AdapterChoice]) -> None:
        key = stack_key(adapters)
        self._known[key] = adapters
        if key not in self._wanted and key not in self._resident.values():
            self._wanted[key] = (adapters, self.now + self.load_ticks)
            self._place()

    def state(self, key: str) -> str:
        self.want(self._known[key])
        if key in self._resident.values():
            return "ready"
        adapters, ready_at = self._wanted[key]
        if ready_at > self.now:
            return "loading"
        return "failed" if adapters[0].digest.startswith("bad") else "full"

    def prefer(self, key: str) -> None:
        if key in self._wanted and self._wanted[key][1] <= self.now:
            self._wanted = {key: self._wanted[key], **self._wanted}

    def failure(self, key: str) -> CoterieError:
        self._wanted.pop(key, None)
        return WeightsError("adapter.safetensors is broken")

    def take(self, key: str) -> PatchStack:
        stack = self.stack(key)
        self._new.pop(key, None)
        self.users[key] = self.users.get(key, 0) + 1
        self._resident[stack.slot] = self._resident.pop(stack.slot)
        return stack

    def release(self, key: str) -> None:
        assert self.users[key] > 0
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self._place()

    def stack(self, key: str) -> PatchStack:
        slot = next(slot for slot, held in self._resident.items() if held == key)
        patches = {SITE: Patch(shift=self._marks[slot])}
        return PatchStack(key=key, slot=slot, patches=patches, soft=self._softs[slot])

    def wait(self, timeout_s: float) -> None:
        """There is no thread to wait for."""

    def stats(self) -> dict[str, float]:
        return {"adapter_evictions": self.num_evictions}

    def stack_bytes(self, key: str) -> int:
        return 64

    def resident(self) -> tuple[str, ...]:
        return tuple(sorted(self._resident.values()))

    def tick(self) -> None:
        self.now += 1
        self._place()

    def _place(self) -> None:
        for key, (adapters, ready_at) in list(self._wanted.items()):
            if ready_at > self.now or adapters[0].digest.startswith("bad"):
                continue
            slot = self._room()
            if slot is None:
                return
            del self._wanted[key]
            self._marks[slot].fill_(toy_mark(adapters))
            soft = toy_soft(adapters)
            self._softs[slot].fill_(-1)
            self._softs[slot][: len(soft), 0] = torch.tensor(soft, dtype=torch.int64)
            self._resident[slot] = key
            self._new[key] = self.now

    def _room(self) -> int | None:
        for slot in range(len(self._marks)):
            if slot not in self._resident:
                return slot
        for slot, key in self._resident.items():
            if key not in self.users and self._new.get(key, -self.HOLD) <= self.now - self.HOLD:
                del self._resident[slot]
                self._new.pop(key, None)
                self.num_evictions += 1
                return slot
        return None


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    *lanes: LaneConfig, model: ToyModel | None = None, clock: Any = None, **settings: Any
) -> Engine:
    return Engine(
        model or ToyModel(),  # type: ignore[arg-type]
        ToyTokenizer(),  # type: ignore[arg-type]
        lanes or (make_lane(),),
        clock=clock or ManualClock(),
        **settings,
    )


def make_lane(name: str = "lane", /, **settings: Any) -> LaneConfig:
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "context": 256,
        "block_size": 4,
        "max_sequences": 8,
        "max_step_tokens": 16,
    }
    return LaneConfig(name=name, **(defaults | settings))


def make_assignment(request_id: str, prompt: Sequence[int], **settings: Any) -> Assignment:
    """Keywords go to Sampling, Limits or Assignment, whichever has the field."""
    sampling: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "n": 1, "num_beams": 1, "seed": 7}
    limits: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    rest: dict[str, Any] = {
        "lane": "lane",
        "adapters": (),
        "session": "",
        "tenant": "t",
        "deadline": None,
        "arrived_at": 100.0,
    }
    for key, value in settings.items():
        if key in Sampling.__dataclass_fields__:
            sampling[key] = value
        elif key in Limits.__dataclass_fields__:
            limits[key] = value
        else:
            rest[key] = value
    return Assignment(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=Sampling(**sampling),
        limits=Limits(**limits),
        **rest,
    )


def true_output(assignment: Assignment, choice: int = 0, count: int | None = None) -> list[int]:
    """Greedy or plain-temperature tokens of one choice, computed without an engine."""
    sampling, limits = assignment.sampling, assignment.limits
    tokens = [*toy_soft(assignment.adapters), *assignment.prompt_ids]
    mark = toy_mark(assignment.adapters)
    output: list[int] = []
    while len(output) < (count or limits.max_tokens or 0):
        logits = chain_logits(tokens, range(mark, mark + len(tokens)))
        token = _pick(logits, sampling, choice, len(output))
        tokens.append(token)
        output.append(token)
        if token == EOS and not limits.ignore_eos:
            break
    return output


def _pick(logits: np.ndarray, sampling: Sampling, choice: int, position: int) -> int:
    if not sampling.temperature:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    sums = np.cumsum(weights)
    noise = uniform(sampling.seed or 0, choice, position)
    return int(np.searchsorted(sums, noise * sums[-1], side="right"))


def drain(engine: Engine, limit: int = 2000, pool: ToyAdapters | None = None) -> list[Any]:
    """Step until there is no work; the books are checked after every step."""
    events: list[Any] = []
    for _ in range(limit):
        if not engine.has_work():
            return events
        if pool is not None:
            pool.tick()
        events += engine.step()
        engine.check()
    raise AssertionError("the engine did not come to an end")


def outputs(events: list[Any]) -> dict[tuple[str, int], list[int]]:
    """Token ids by (request, choice)."""
    from coterie.core.events import Delta

    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, Delta):
            found.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
    return found


def texts(events: list[Any]) -> dict[tuple[str, int], str]:
    from coterie.core.events import Delta

    found: dict[tuple[str, int], str] = {}
    for event in events:
        if isinstance(event, Delta):
            key = (event.request_id, event.choice)
            found[key] = found.get(key, "") + event.text
    return found


def taken_over(assignment: Assignment, seen: Sequence[Any]) -> Assignment:
    """What another engine is asked for when the client has the deltas `seen`."""
    emitted: list[list[int]] = [[] for _ in range(assignment.sampling.n or 1)]
    for delta in seen:
        emitted[delta.choice] += delta.token_ids
    return replace(
        assignment,
        emitted=tuple(map(tuple, emitted)),
        finished=tuple(delta.choice for delta in seen if delta.finish_reason),
    )
