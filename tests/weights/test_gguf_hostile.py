"""Broken and hostile GGUF files: always a WeightsError that names the file, never anything else."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import WeightsError
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.gguf import read_gguf
from tests.helpers.models.gguf_files import write_model

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["t", "o", "to", "<end>", *(f"<{i}>" for i in range(92))],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, *[4] * 92],
    "tokenizer.ggml.merges": ["t o"],
    "tokenizer.ggml.eos_token_id": 3,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write_model(path, kind="Q4_1", metadata=TOKENIZER)
    return path


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(keys: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys))
    return counts + b"".join(keys) + b"".join(tensors)


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert path.name in message
    assert message.rstrip().endswith("."), "a sentence that says what to do"
    return message


def padded(raw: bytes, data: int = 4096) -> bytes:
    return raw + bytes(-len(raw) % 32 + data)


def test_truncation_at_every_kind_of_place(sound: Path, tmp_path: Path) -> None:
    whole = sound.read_bytes()
    end = read_gguf(sound).header_bytes
    cuts = [*range(64), *range(64, end, 37), end, end + 1, len(whole) // 2, len(whole) - 1]
    for cut in cuts:
        refused(tmp_path / "cut.gguf", whole[:cut])


def test_flipped_bits_never_crash(sound: Path, tmp_path: Path) -> None:
    whole = bytearray(sound.read_bytes())
    end = read_gguf(sound).header_bytes
    chance = random.Random(5)
    path = tmp_path / "flipped.gguf"
    outcomes = {"refused": 0, "read": 0}
    for _ in range(300):
        at, bit = chance.randrange(end), 1 << chance.randrange(8)
        whole[at] ^= bit
        path.write_bytes(whole)
        whole[at] ^= bit
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names()[:4]:
                checkpoint.read(name)
            outcomes["read"] += 1
        except WeightsError as error:
            assert "flipped.gguf" in str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["read"] > 0


def test_flipped_bits_never_crash_the_tokenizer(sound: Path, tmp_path: Path) -> None:
    whole = bytearray(sound.read_bytes())
    assert load_tokenizer(sound).encode("to<end>") == [2, 3]
    start, end = whole.index(b"tokenizer.ggml.model"), read_gguf(sound).header_bytes
    path = tmp_path / "flipped.gguf"
    chance = random.Random(6)
    refused = 0
    for _ in range(300):
        at, bit = chance.randrange(start, end), 1 << chance.randrange(8)
        whole[at] ^= bit
        path.write_bytes(whole)
        whole[at] ^= bit
        try:
            load_tokenizer(path).encode("to<end>")
        except WeightsError as error:
            assert "flipped.gguf" in str(error)
            refused += 1
    assert refused > 50


def test_huge_counts_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    huge = 1 << 62
    cases = [
        struct.pack("<4sIQQ", b"GGUF", 3, huge, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, huge),
        struct.pack("<4sIQQ", b"GGUF", 3, 60_000, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 60_000),
        header([struct.pack("<Q", huge)], []),
        header([key("a", STRING, struct.pack("<Q", huge))], []),
        header([key("a", ARRAY, struct.pack("<IQ", UINT32, huge))], []),
        header([key("a", ARRAY, struct.pack("<IQ", STRING, huge))], []),
        header([key("a", ARRAY, struct.pack("<IQ", STRING, 4_000_000))], []),
        header([key("a", ARRAY, struct.pack("<IQ", BOOL, huge))], []),
        header([], [tensor("t", (huge, huge, huge, huge), 0, 0)]),
        header([], [tensor("t", (1 << 20,), 0, huge)]),
    ]
    tracemalloc.start()
    started = time.process_time()
    for case in cases:
        refused(path, padded(case, 64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "bytes"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + bytes(99), "big endian"),
        (header([], [], version=1) + bytes(99), "version 1"),
        (header([], [], version=4) + bytes(99), "version 4"),
        (header([key("a", 99, b"")], []) + bytes(99), "type 99"),
        (header([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []) + bytes(99), "type 9"),
        (header([key("a", BOOL, b"\x07")], []) + bytes(99), "bool"),
        (header([key("a", STRING, text(b"\xff\xfe"))], []) + bytes(99), "UTF-8"),
        (header([text(b"\xff\xfe") + bytes(4)], []) + bytes(99), "UTF-8"),
        (header([key("a", UINT32, bytes(4))] * 2, []) + bytes(99), "twice"),
        (header([key("general.alignment", UINT32, bytes(4))], []) + bytes(99), "alignment"),
        (header([key("general.alignment", UINT32, b"\x30\0\0\0")], []) + bytes(99), "alignment"),
        (header([], [tensor("t", (4,), 0, 0)] * 2) + bytes(99), "twice"),
        (header([], [tensor("t", (4,), 0, 3)]) + bytes(99), "offset"),
        (header([], [tensor("t", (), 0, 0)]) + bytes(99), "dimensions"),
        (header([], [tensor("t", (1,) * 9, 0, 0)]) + bytes(999), "dimensions"),
        (header([], [tensor("t", (0, 4), 0, 0)]) + bytes(99), "shape"),
        (header([], [tensor("t", (33,), 8, 0)]) + bytes(99), "shape"),
        (header([], [tensor("t", (256,), 16, 0)]) + bytes(99), "IQ2_XXS"),
        (header([], [tensor("t", (256,), 77, 0)]) + bytes(99), "unknown type 77"),
        (header([], [tensor("t", (4096,), 0, 0)]) + bytes(99), "truncated"),
        (
            header([], [tensor("a", (64,), 0, 0), tensor("b", (64,), 0, 32)]) + bytes(999),
            "offset",
        ),
    ],
)
def test_each_fault_is_named(data: bytes, word: str, tmp_path: Path) -> None:
    assert word in refused(tmp_path / "bad.gguf", data)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere\.gguf"):
        open_checkpoint(tmp_path / "nowhere.gguf")
    with pytest.raises(WeightsError, match=r"nowhere\.gguf"):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(WeightsError):
        read_gguf(tmp_path)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    raw = header(
        [key("general.architecture", STRING, text("llama"))],
        [tensor("token_embd.weight", (32, 4), 0, 0)],
    )
    assert "llama.attention.head_count" in refused(tmp_path / "bare.gguf", padded(raw))


def test_version_2_is_read(sound: Path, tmp_path: Path) -> None:
    whole = bytearray(sound.read_bytes())
    whole[4] = 2
    path = tmp_path / "two.gguf"
    path.write_bytes(whole)
    assert read_gguf(path).version == 2
    assert open_checkpoint(path).names() == open_checkpoint(sound).names()


def test_fingerprints_follow_the_content(sound: Path, tmp_path: Path) -> None:
    first = open_checkpoint(sound)
    assert first.fingerprint() == open_checkpoint(sound).fingerprint()
    other = bytearray(sound.read_bytes())
    other[read_gguf(sound).tensors["blk.1.ffn_up.weight"].offset + 9] ^= 1
    path = tmp_path / "other.gguf"
    path.write_bytes(other)
    assert open_checkpoint(path).fingerprint() != first.fingerprint()


# as quantisers mix types; a model in three files; every type by itself
BASES: dict[str, dict[str, Any]] = {
    "q4_1": {"kind": "Q4_1"},
    "mixed": {"kind": "Q4_K", "mixed": {"v_proj": "Q6_K", "down_proj": "Q5_0", "o_proj": "Q8_0"}},
    "tied": {"kind": "Q5_K", "mixed": {"embed_tokens": "Q6_K", "q_proj": "Q5_1"}, "tied": True},
    "split": {"kind": "Q8_0", "mixed": {"down_proj": "Q4_0"}, "parts": 3},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bases")
    for name, given in BASES.items():
        write_model(folder / f"{name}.gguf", metadata=TOKENIZER, **given)
    first = [folder / f"{name}.gguf" for name in BASES if name != "split"]
    return [*first, next(folder.glob("split-00001-of-*.gguf"))]


@pytest.mark.parametrize(
    ("first", "count"), [(0, 60), pytest.param(1000, 2000, marks=pytest.mark.full)]
)
def test_a_mutated_model_is_refused_or_runs(bases: list[Path], first: int, count: int) -> None:
    """Loaded and run in a process of their own: none ends it, hangs or takes much memory."""
    module = "tests.helpers.models.mutated_gguf"
    done = subprocess.run(
        [sys.executable, "-m", module, str(first), str(count), *map(str, bases)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    found = [line for line in lines if "found" in line]
    assert len(found) == count
    size = max(base.stat().st_size for base in bases)
    for line in found:
        assert line["found"] == "ran" or line["found"].startswith("refused"), line
        # what is grown once for the whole process, as buffers of threads are
        assert line["grown"] < 8 * size + 16_000_000, line
        assert line["seconds"] < 30, line
    for base in bases:
        outcomes = {line["found"] for line in found if line["base"] == base.name}
        assert "refused: WeightsError" in outcomes, base.name
    assert "ran" in {line["found"] for line in found}
