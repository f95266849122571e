"""A GGUF model in several files is the model in one, whichever part is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import dense
from tests.helpers.models.gguf_files import write_model

PARTS = 3
NAMES = [f"model-{number:05}-of-{PARTS:05}.gguf" for number in range(1, PARTS + 1)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A folder with the parts, as llama.cpp's own writer makes them."""
    write_model(tmp_path / "model.gguf", kind="Q8_0", parts=PARTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    return tmp_path


def test_any_part_names_the_whole_model(
    split: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_model(whole, kind="Q8_0")
    want = open_checkpoint(whole)
    for path in (*(split / name for name in NAMES), split):
        found = open_checkpoint(path)
        assert found.config == want.config and sorted(found.names()) == sorted(want.names())
        for name in want.names():
            assert torch.equal(dense(found.read(name)), dense(want.read(name))), name
            extent = found.extent(name)
            assert extent.path.parent == split and extent.nbytes == want.extent(name).nbytes
        assert found.fingerprint() == open_checkpoint(split).fingerprint()
        found.release()


def test_a_change_in_any_part_is_another_model(split: Path) -> None:
    checkpoint = open_checkpoint(split)
    before = checkpoint.fingerprint()
    extents = [checkpoint.extent(name) for name in checkpoint.names()]
    place = next(extent for extent in extents if extent.path.name == NAMES[2])
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\x01" * 8)
    assert open_checkpoint(split).fingerprint() != before


@pytest.mark.parametrize("missing", range(PARTS))
def test_a_missing_part_is_named(split: Path, missing: int) -> None:
    (split / NAMES[missing]).unlink()
    rest = next(name for name in NAMES if name != NAMES[missing])
    with pytest.raises(WeightsError, match=rf"{NAMES[missing]}: missing, part {missing + 1} of 3"):
        open_checkpoint(split / rest)


def test_a_part_of_another_model_is_named(
    split: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write_model(other / "model.gguf", "qwen2", kind="Q8_0", parts=PARTS)
    good = (split / NAMES[1]).read_bytes()
    for foreign, said in (
        (other / NAMES[1], "split.tensors.count"),
        (split / NAMES[2], "split.no is 2, not 1"),
    ):
        (split / NAMES[1]).write_bytes(foreign.read_bytes())
        with pytest.raises(
            WeightsError, match=rf"{NAMES[1]}: not a part of the same model.*{said}"
        ):
            open_checkpoint(split / NAMES[0])
        (split / NAMES[1]).write_bytes(good)
    open_checkpoint(split / NAMES[0])


def test_parts_need_their_own_names(split: Path) -> None:
    shutil.copyfile(split / NAMES[0], split / "first.gguf")
    with pytest.raises(WeightsError, match=r"first.gguf: one of 3 parts.*NAME-00001-of-00003"):
        open_checkpoint(split / "first.gguf")


def test_a_truncated_part_is_named(split: Path) -> None:
    whole = (split / NAMES[2]).read_bytes()
    (split / NAMES[2]).write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match=rf"{NAMES[2]}: truncated"):
        open_checkpoint(split / NAMES[0])
