"""Tables of the GPU programs' sizes: read, written, used; and the search that fills them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from coterie.cli import machine
from coterie.cli.doctor import sizes_line
from coterie.cli.main import main
from coterie.kernels import size_table
from coterie.kernels.size_table import ExpertPoolShape, MatrixShape, numbers_of, with_numbers
from coterie.kernels.triton import expert_groups
from coterie.kernels.triton import tune as tuning
from coterie.kernels.triton.expert_gemv import PairSizes
from coterie.kernels.triton.gemv import GemvSize
from coterie.kernels.triton.tune import TuneCase, TunePart, best_sizes, tune, tune_cases
from coterie.models.base import read_spec
from coterie.models.gpu_shapes import model_shapes
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.tiny import tiny_checkpoint

GPU = "NVIDIA Test 9000"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with that GPU; returns the file of its own table."""
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path))
    monkeypatch.setattr(size_table, "device_name", lambda: GPU)
    size_table._table.cache_clear()
    yield size_table.own_file(GPU)
    size_table._table.cache_clear()


def test_a_shape_with_an_entry_takes_it_and_others_the_default(gpu: Path) -> None:
    assert size_table.tuned("pairs bf16 64x32", PairSizes(8, 4, 4, 4, 256)).down_chunk == 256
    written = size_table.write_table(GPU, {"pairs bf16 64x32": (2, 4, 2, 8, 128)})
    assert written == gpu and gpu.name == "nvidia-test-9000.json"
    found = size_table.tuned("pairs bf16 64x32", PairSizes(8, 4, 4, 4, 256))
    assert found == PairSizes(2, 4, 2, 8, 128)
    assert size_table.tuned("gemv dense 8x8", GemvSize(4, 4)) == GemvSize(4, 4)


def test_entries_are_added_to_those_before(gpu: Path) -> None:
    size_table.write_table(GPU, {"a": (1,), "b": (2, 3)})
    size_table.write_table(GPU, {"b": (4, 5)})
    table = size_table.read_table(GPU)
    assert table.entries == {"a": (1,), "b": (4, 5)} and table.files == (gpu,)
    assert table.missing(["a", "c"]) == ["c"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sizes": 3}', '{"sizes": {"gemv": "x"}}'])
def test_a_damaged_table_is_as_none(gpu: Path, text: str) -> None:
    gpu.parent.mkdir(parents=True)
    gpu.write_text(text)
    assert size_table.tuned("gemv dense 8x8", GemvSize(4, 2)) == GemvSize(4, 2)


def test_an_entry_of_another_kernel_version_is_not_used(gpu: Path) -> None:
    size_table.write_table(GPU, {"gemv dense 8x8": (1, 2, 3)})
    assert size_table.tuned("gemv dense 8x8", GemvSize(4, 2)) == GemvSize(4, 2)


def test_sizes_become_numbers_and_back() -> None:
    spans = expert_groups.LARGE_SPANS
    numbers = numbers_of(spans)
    assert numbers[:2] == (128, 0) and len(numbers) > 10
    assert with_numbers(expert_groups.FEW_SPANS, numbers) == spans


def test_shipped_tables_fit_the_kernels() -> None:
    """Every entry is the right number of numbers for some case of today's kernels."""
    for file in size_table._SHIPPED.glob("*.json"):
        found = json.loads(file.read_text())
        assert file.name == size_table.file_name(found["device"])
        for shape, numbers in found["sizes"].items():
            kernel, kind, size = shape.split(" ")
            a, b = map(int, size.split("x"))
            own = (
                MatrixShape("product", kind, a, b)
                if kernel == "gemv"
                else ExpertPoolShape(kind, a, b, 128, 8)
            )
            defaults = {case.shape: case.default for case in tune_cases([own], "cuda")}
            assert len(numbers_of(defaults[shape])) == len(numbers), shape


def test_less_shared_memory_means_fewer_stages() -> None:
    fitting = expert_groups.within(expert_groups.LARGE_SPANS, 120 << 10)
    assert isinstance(fitting, expert_groups.SpanSizes)
    assert (fitting.gate_up.stages, fitting.down.stages) == (2, 2)
    assert expert_groups.within(expert_groups.LARGE_SPANS, 227 << 10) == expert_groups.LARGE_SPANS


def searched(
    seconds: Callable[[GemvSize], float], computes: Callable[[GemvSize], float] = lambda size: 1.0
) -> tuple[GemvSize, float]:
    default, tried = GemvSize(8, 4), [GemvSize(4, 4), GemvSize(16, 4), GemvSize(16, 8)]
    ran: list[GemvSize] = []

    out = torch.zeros(3)

    def launch(sizes: GemvSize, copy: int) -> None:
        ran.append(sizes)
        out.add_(computes(sizes))

    def time(launches: Sequence[Callable[[], None]]) -> float:
        ran.clear()
        for each in launches:
            each()
        assert len(ran) == 3
        return seconds(ran[0])

    case = TuneCase("x", default, lambda: ([TunePart(lambda best: tried, launch, out)], 3))
    found, share = best_sizes(case, time)
    assert isinstance(found, GemvSize)
    return found, share


def test_the_fastest_sizes_are_found() -> None:
    def seconds(size: GemvSize) -> float:
        if size.rows == 4:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 / size.rows / size.warps

    assert searched(seconds) == (GemvSize(16, 8), pytest.approx(0.25))


def test_the_default_stays_where_others_gain_nothing() -> None:
    assert searched(lambda size: 0.99 if size.rows == 16 else 1.0) == (GemvSize(8, 4), 1.0)


def test_sizes_with_another_result_are_passed_over() -> None:
    found = searched(
        lambda size: 1.0 / size.rows / size.warps, lambda size: 2.0 if size.warps == 8 else 1.001
    )
    assert found == (GemvSize(16, 4), pytest.approx(0.5))


def test_progress_of_all_cases() -> None:
    cases = [TuneCase(name, GemvSize(1, 1), lambda: ([], 1)) for name in "ab"]
    seen: list[tuple[int, Any]] = []
    assert len(list(tune(cases, lambda done, total: seen.append((done, total))))) == 2
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_doctor_says_what_was_measured() -> None:
    assert sizes_line(None) == "not needed"
    known = {"device": GPU, "files": [], "entries": 0, "missing": {"m": ["gemv dense 8x8"]}}
    assert "no table for NVIDIA Test 9000" in sizes_line(known)
    assert "coterie tune" in sizes_line(known)
    line = sizes_line({**known, "entries": 3})
    assert "1 of m are not (gemv dense 8x8)" in line and "coterie tune m" in line
    assert sizes_line({**known, "entries": 3, "missing": {"m": []}}).endswith(GPU)


def test_shapes_of_models() -> None:
    """As the device's decoder reads them."""
    dense = {shape.kernel + f" {shape.count}x{shape.width}" for shape in matrices("llama")}
    spec = read_spec(open_checkpoint(tiny_checkpoint("llama")))
    assert f"gate_up {2 * spec.intermediate}x{spec.hidden}" in dense
    assert f"product {spec.vocab}x{spec.hidden}" in dense and len(dense) == 5
    spec = read_spec(open_checkpoint(tiny_checkpoint("deepseek_v2")))
    latent = {shape.kernel + f" {shape.count}x{shape.width}" for shape in matrices("deepseek_v2")}
    assert spec.latent is not None
    assert f"add {spec.hidden}x{spec.num_heads * spec.latent.value}" in latent


def matrices(model: str) -> list[MatrixShape]:
    found = model_shapes(tiny_checkpoint(model), "bf16")
    return [shape for shape in found if isinstance(shape, MatrixShape)]


def test_tune_measures_what_a_model_lacks(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint("qwen3_moe")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(tuning, "best_sizes", lambda case, time: (case.default, 0.5))
    facts = {"cuda": GPU, "triton": "3.6"}, [{"source": "m", "path": str(model)}]
    before = machine.gpu_sizes(*facts)
    assert before is not None and before["entries"] == 0
    lacking = before["missing"]["m"]
    kernels = {shape.split(" ")[0].rstrip("0123456789") for shape in lacking}
    assert {"gemv", "pairs", "tiles"} <= kernels
    assert main(["tune", str(model), "--dtype", "fp32"]) == 0
    told = capsys.readouterr()
    assert f"{len(lacking)} of {len(lacking)} shapes" in told.err and str(gpu) in told.out
    assert f"tuning: {len(lacking)} of {len(lacking)} shapes" in told.err
    after = machine.gpu_sizes(*facts)
    assert after is not None and after["entries"] == len(lacking)
    assert after["missing"] == {"m": []} and after["files"] == [str(gpu)]
    assert main(["tune", str(model), "--dtype", "fp32"]) == 0
    assert "0 of" in capsys.readouterr().err
    assert machine.gpu_sizes({"cuda": None, "triton": None}, []) is None
