"""The inputs of decode steps that Triton kernels make are those of the plain twins, in Triton's
interpreter; and the noise is that of the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.kernels.hopper import compiled, some_every_time, usage
from tests.helpers.kernels.triton_interpreter import interpreted, on_host

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(300)

# rows that a step has room for, rows in use, blocks of the longest, block size, whether some draw
CASES, MORE = ["1/1/3/16/drawn", "4/3/5/8/drawn", "8/8/2/4/greedy"], ["64/40/3/16/drawn"]


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_the_twin(differences: dict[str, float], case: str) -> None:
    assert differences[case] == 0


@pytest.mark.full
def test_many_rows_are_the_same_as_the_twin() -> None:
    assert not any(interpreted(__file__, MORE).values())


def test_noise_is_that_of_the_engine() -> None:
    from coterie.engine.draw import uniforms
    from coterie.kernels.reference.step import uniforms as twin

    rng = np.random.default_rng(5)
    keys, counts = rng.integers(0, 2**64, 99, dtype=np.uint64), rng.integers(0, 2**20, 99)
    found = twin(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(counts))
    assert np.array_equal(found.numpy(), uniforms(keys, counts.tolist()))


KERNELS: dict[str, dict[str, int]] = {
    "_receive": {"BLOCK": 16, "CHUNK": 256, "HEADER": 4, "WORDS": 11},
    "_advance": {"BLOCK": 16, "ROWS": 32},
}
TYPES = {
    **dict.fromkeys(("ints", "context_lens", "tables", "top_ks"), "*i32"),
    **dict.fromkeys(("floats", "temperatures"), "*fp32"),
    **dict.fromkeys(("doubles", "top_ps", "min_ps", "noise"), "*fp64"),
    **dict.fromkeys(("room", "width", "stride"), "i32"),
}


@pytest.mark.parametrize("name", some_every_time(KERNELS, ["_advance"]))
def test_compiles_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import fill

    built = compiled(vars(fill)[name], TYPES, KERNELS[name], 1, aligned=None, other="*i64")
    registers, stack = usage(built.asm["cubin"], tmp_path)
    assert registers <= 128 and stack == 0


def random_step(case: str, rng: Any) -> tuple[Any, Any, Any]:
    """A message, and the places that it goes to, with values of an earlier step."""
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.step_message import DecodeFields, DrawColumns, DrawFields, MessageWords

    *numbers, kind = case.split("/")
    room, live, width, block_size = map(int, numbers)

    def old(*size: int, dtype: Any = torch.int64) -> Any:
        return torch.from_numpy(rng.integers(0, 9, size)).to("cpu", dtype)

    starts = torch.arange(room + 1, dtype=torch.int32)
    lens, tables = old(room, dtype=torch.int32), old(room, width + 2, dtype=torch.int32)
    batch = AttentionBatch(old(room), old(room), starts, lens, tables, block_size)
    fields = DrawFields.empty(room + 3, room + 9, torch.device("cpu"))
    fields.tokens.copy_(old(room + 9) + 100)
    columns = DrawColumns(
        rng.random(live).astype(np.float32),
        rng.integers(0, 50, live).astype(np.int32),
        rng.random(live),
        rng.random(live),
        rng.integers(0, 2**64, live, dtype=np.uint64),
        rng.integers(0, 3, live),
        "filtered",
    )
    with on_host():
        words = MessageWords(room, width)
    given, drawn = rng.integers(0, 99, live), ~rng.integers(0, live, live)
    tokens = np.where(rng.random(live) < 0.5, given, drawn)
    positions = rng.integers(3, width * block_size - 3, live)
    blocks = rng.integers(0, 99, (live, width)).astype(np.int32)
    count = words.write(room, tokens, positions, blocks, columns if kind == "drawn" else None)
    step = DecodeFields(old(room), old(room), batch)
    return words.tensor[:count].to("cpu"), step, fields.first(room)


def tensors(*records: Any) -> list[Any]:
    found = []
    for record in records:
        values = [getattr(record, name) for name in record.__dataclass_fields__]
        found += [value for value in values if isinstance(value, torch.Tensor)]
        found += tensors(*(v for v in values if hasattr(v, "__dataclass_fields__")))
    return found


def num_differences(case: str) -> int:
    from coterie.kernels.reference import step as reference
    from coterie.kernels.triton import fill

    message, *places = random_step(case, np.random.default_rng())
    twins = copy.deepcopy(places)
    fill.receive_step(message, *places)
    reference.receive_step(message, *twins)
    different = 0
    for _ in range(3):
        pairs = zip(tensors(*places), tensors(*twins), strict=True)
        different += sum(not torch.equal(found, wanted) for found, wanted in pairs)
        fill.advance_step(*places)
        reference.advance_step(*twins)
    return different


def measure(cases: list[str]) -> dict[str, float]:
    """Numbers of tensors that differ."""
    return {case: float(num_differences(case)) for case in cases}
