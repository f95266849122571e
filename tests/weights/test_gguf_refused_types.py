"""GGUF types that nothing here reads are refused by every command before anything is loaded."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from coterie.cli.main import main
from coterie.core.errors import WeightsError
from coterie.weights.formats import gguf as header
from coterie.weights.formats.gguf import TENSOR_TYPES, read_gguf
from tests.helpers.models.gguf_files import write_model

OTHERS = {kind.value: kind for kind in gguf.GGMLQuantizationType if kind.value not in TENSOR_TYPES}


def retyped(path: Path, number: int, part: str = "ffn_down") -> Path:
    """A whole model of Q8_0 whose tensors of one part claim another type."""
    write_model(path, kind="Q8_0")
    data = bytearray(path.read_bytes())
    for name, info in read_gguf(path).tensors.items():
        if part in name:
            after = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
            struct.pack_into("<I", data, after + 4 + 8 * len(info.shape), number)
    path.write_bytes(data)
    return path


def test_every_type_of_the_format_is_known_with_its_size() -> None:
    known = {**TENSOR_TYPES, **header._OTHER_TYPES}
    for kind in gguf.GGMLQuantizationType:
        assert known[kind.value] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("number", OTHERS, ids=[kind.name for kind in OTHERS.values()])
def test_the_refusal_tells_type_share_and_cost(number: int, tmp_path: Path) -> None:
    path = retyped(tmp_path / "model.gguf", number)
    with pytest.raises(WeightsError) as refused:
        read_gguf(path)
    message = refused.value.message
    elements, (block, nbytes) = 256 * 512, gguf.GGML_QUANT_SIZES[OTHERS[number]]
    stored = 2 * elements // block * nbytes
    assert f"2 of 21 tensors, {stored / 1e6:,.1f} MB of" in message
    assert f"are stored as {OTHERS[number].name}, which is not supported" in message
    assert "Nothing was loaded" in message and "Q4_K" in message
    write_model(tmp_path / "plain.gguf", kind="Q8_0")
    sound = read_gguf(tmp_path / "plain.gguf").tensors
    rest = sum(info.nbytes for name, info in sound.items() if "ffn_down" not in name)
    assert f"takes {(rest + 2 * elements * 144 / 256) / 1e6:,.1f} MB" in message


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["plan"],
        ["run", "--prompt", "x"],
        ["serve", "--port", "0"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_says_it_and_ends(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = retyped(tmp_path / "model.gguf", 10)
    assert main([command[0], str(path), *command[1:]]) != 0
    said = capsys.readouterr().err
    assert "stored as Q2_K, which is not supported" in said and "Use a file with" in said
