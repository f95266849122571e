"""Packed stores: the same experts as the model, an index that is never trusted, checked records."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.kernels.cpu.expert_record import rebias
from coterie.moe.store import packed as packed_store
from coterie.moe.store import packed as store_index
from coterie.moe.store.disk import aligned_buffer
from coterie.moe.store.export import export
from coterie.moe.store.inspect import verify
from coterie.moe.store.packed import EXPERTS_FILE, INDEX_FILE, open_packed, read_index
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import GgufBlocks
from tests.helpers.moe import store_files

Document = dict[str, Any]


def pack(model: Path, out: Path, dtype: str = "auto", *, gated: bool = True) -> Path:
    checkpoint = open_checkpoint(model)
    export(checkpoint, store_files.opened(checkpoint, dtype, gated=gated), out)
    return out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    return pack(
        store_files.write(folder / "m", store_files.singles(store_files.draw())),
        folder / "p",
        "int8",
    )


@pytest.mark.parametrize("dtype", ["auto", "bf16", "int8", "int4"])
@pytest.mark.parametrize("gated", [True, False])
def test_packed_experts_are_the_models(tmp_path: Path, dtype: str, gated: bool) -> None:
    weights = store_files.draw(gated=gated)
    names = store_files.NAMES if gated else store_files.PLAIN_NAMES
    model = store_files.write(tmp_path / "m", store_files.singles(weights, names))
    store = store_files.opened(pack(model, tmp_path / "p", dtype, gated=gated), gated=gated)
    assert isinstance(store, packed_store.PackedStore)
    store_files.expect(store, weights, dtype)
    assert store.staging_bytes == 0
    assert verify(store).faults == ()


def test_the_backbone_is_as_stored_and_nothing_else(tmp_path: Path) -> None:
    model = open_checkpoint(
        store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    )
    backbone = open_checkpoint(pack(model.path, tmp_path / "p"))
    assert sorted(backbone.names()) == sorted(n for n in model.names() if ".experts." not in n)
    for name in backbone.names():
        assert backbone.stored_as(name) == model.stored_as(name)
        assert backbone.shape(name) == model.shape(name)
        assert backbone.raw(name).tobytes() == model.raw(name).tobytes()
    copied = {file.name for file in (tmp_path / "p").iterdir()}
    assert copied == {
        "config.json", "tokenizer.json", "backbone.safetensors", EXPERTS_FILE, INDEX_FILE,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_packed_from_gguf(tmp_path: Path, kind: str) -> None:
    """Stored blocks stay as they are, in the experts and in the backbone."""
    model = store_files.write_gguf(tmp_path / "m.gguf", kind, "Q6_K")
    source = store_files.open_gguf(model)
    export(model, source, tmp_path / "p")
    store = open_packed(tmp_path / "p")
    assert store.index.kinds == {0: source.layout(0).kinds}
    for key in source.geometry.keys():  # noqa: SIM118
        wanted, found = store_files.parts_of(source, key), store_files.parts_of(store, key)
        assert all(torch.equal(wanted[part], found[part]) for part in wanted)
    backbone = open_checkpoint(tmp_path / "p")
    name = "blk.0.attn_output.weight"
    assert backbone.names() == [name] and backbone.stored_as(name) == "Q8_0"
    kept, given = backbone.read(name), model.read(name)
    assert isinstance(kept, GgufBlocks) and isinstance(given, GgufBlocks)
    assert kept.type == given.type and torch.equal(kept.data, given.data)


@pytest.mark.parametrize(
    ("kept", "asked", "served"),
    [("bf16", "int8", "int8"), ("int8", "fp32", "fp32"), ("int4", "int8", "int4")],
)
def test_another_precision_is_made_while_reading(
    tmp_path: Path, kept: str, asked: str, served: str
) -> None:
    weights = store_files.draw()
    path = pack(
        store_files.write(tmp_path / "m", store_files.singles(weights)), tmp_path / "p", kept
    )
    plain, store = open_packed(path), store_files.opened(path, asked)
    assert store.layout(0).kinds == (served,) * 3
    values = {
        key: store_files.parts_of(plain, key)
        for key in plain.geometry.keys()  # noqa: SIM118
    }
    if served != kept:
        store_files.expect(store, values, asked)
    else:
        store_files.expect(store, values)


def test_a_record_of_another_machines_offset_is_turned(packed: Path, tmp_path: Path) -> None:
    path = shutil.copytree(packed, tmp_path / "p")
    store = open_packed(path)
    wanted = store_files.parts_of(store, (0, 1))
    foreign = 128 - store.index.weight_offset
    content = bytearray((path / EXPERTS_FILE).read_bytes())
    digests = {}
    for key, record in store.index.records.items():
        data = torch.frombuffer(content, dtype=torch.uint8)[record.offset :][: record.nbytes]
        rebias(store.index.layout(key[0]), data)
        digests[key] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    (path / EXPERTS_FILE).write_bytes(content)
    records = {
        key: store_index.RecordLocation(record.offset, record.nbytes, digests[key])
        for key, record in store.index.records.items()
    }
    edit(path, lambda index: {"records": records, "weight_offset": foreign})
    found = store_files.parts_of(open_packed(path), (0, 1))
    assert all(torch.equal(wanted[part], found[part]) for part in wanted)


def edit(path: Path, change: Callable[[store_index.StoreIndex], Document]) -> None:
    index = read_index(path)
    replace(index, **change(index)).save(path)


def test_a_checksum_is_checked_at_the_first_read(packed: Path, tmp_path: Path) -> None:
    path = shutil.copytree(packed, tmp_path / "p")
    store = open_packed(path)
    out = aligned_buffer(store.slot_bytes)
    store.read((2, 3), out)
    checked_s = store.spent.checksum_s
    store.read((2, 3), out)
    assert store.spent.checksum_s == checked_s > 0
    record = store.index.records[2, 4]
    with (path / EXPERTS_FILE).open("r+b") as file:
        file.seek(record.offset + 99)
        file.write(b"\xff\x00\xff")
    for _ in range(2):
        with pytest.raises(WeightsError, match="expert 4 of layer 2 is damaged"):
            store.read((2, 4), out)
    store.read((2, 5), out)
    result = verify(open_packed(path))
    assert len(result.faults) == 1 and "expert 4 of layer 2" in result.faults[0]


def row(layer: str, expert: int, change: Callable[[list[Any]], object]) -> Callable[..., None]:
    def apply(document: Document) -> None:
        change(document["layers"][layer]["experts"][expert])

    return apply


def setting(name: str, value: Any) -> Callable[[Document], None]:
    return lambda document: document.__setitem__(name, value)


HOSTILE: dict[str, tuple[Callable[[Document], object], str]] = {
    "version": (setting("version", 1), "version 1"),
    "hidden": (setting("hidden", -1), "hidden is '-1'"),
    "hidden huge": (setting("hidden", 1 << 60), "hidden"),
    "hidden text": (setting("hidden", "64"), "hidden"),
    "gated": (setting("gated", 1), "gated"),
    "experts": (setting("num_experts", True), "num_experts"),
    "top_k": (setting("top_k", 7), "top_k"),
    "layers": (setting("layers", []), "no layers"),
    "layer name": (lambda d: d["layers"].update({"../x": {}}), "makes no sense"),
    "layer order": (
        lambda d: d.__setitem__("layers", dict(reversed(d["layers"].items()))),
        "out of order",
    ),
    "kinds": (lambda d: d["layers"]["0"].update(kinds=["int9"] * 3), "unknown kinds"),
    "kind impossible": (lambda d: d["layers"]["0"].update(kinds=["q4_k"] * 3), "cannot keep"),
    "rows": (lambda d: d["layers"]["2"]["experts"].pop(), "does not list"),
    "offset": (row("2", 1, lambda r: r.__setitem__(0, 100)), "impossible offset"),
    "offset negative": (row("2", 1, lambda r: r.__setitem__(0, -4096)), "impossible offset"),
    "offset far": (row("2", 1, lambda r: r.__setitem__(0, 1 << 40)), "truncated"),
    "offset real": (row("2", 1, lambda r: r.__setitem__(0, 0.5)), "makes no sense"),
    "overlap": (row("2", 1, lambda r: r.__setitem__(0, 0)), "overlaps"),
    "size": (row("0", 1, lambda r: r.__setitem__(1, 4096)), "instead of"),
    "digest": (row("0", 1, lambda r: r.__setitem__(2, "00")), "makes no sense"),
    "entry": (lambda d: d["layers"]["0"]["experts"].__setitem__(0, {}), "makes no sense"),
    "too few": (
        lambda d: d["layers"]["0"].update(experts=[None] * store_files.EXPERTS),
        "fewer than the 2",
    ),
    "lineage": (setting("lineage", [1]), "lineage"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused(packed: Path, tmp_path: Path, name: str) -> None:
    """Even one whose fingerprint was made to fit."""
    path = shutil.copytree(packed, tmp_path / "p")
    change, said = HOSTILE[name]
    document = json.loads((path / INDEX_FILE).read_text())
    change(document)
    document.pop("fingerprint")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    (path / INDEX_FILE).write_text(json.dumps(document))
    before = sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())
    with pytest.raises(WeightsError, match=said):
        store_files.opened(path)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()) == before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "[" * 100_000])
def test_an_index_that_is_none(packed: Path, tmp_path: Path, text: str) -> None:
    path = shutil.copytree(packed, tmp_path / "p")
    (path / INDEX_FILE).write_text(text)
    with pytest.raises(WeightsError):
        store_files.opened(path)


def test_an_edited_index_does_not_match_its_fingerprint(packed: Path, tmp_path: Path) -> None:
    path = shutil.copytree(packed, tmp_path / "p")
    document = json.loads((path / INDEX_FILE).read_text())
    document["layers"]["0"]["experts"][1] = None
    (path / INDEX_FILE).write_text(json.dumps(document))
    with pytest.raises(WeightsError, match="fingerprint"):
        store_files.opened(path)


def test_truncated_and_missing_records(packed: Path, tmp_path: Path) -> None:
    path = shutil.copytree(packed, tmp_path / "p")
    size = (path / EXPERTS_FILE).stat().st_size
    with (path / EXPERTS_FILE).open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(WeightsError, match="expert 5 of layer 2 ends at byte"):
        store_files.opened(path)
    (path / EXPERTS_FILE).unlink()
    with pytest.raises(WeightsError, match="No such file"):
        store_files.opened(path)


def test_a_store_of_another_model_is_refused(packed: Path) -> None:
    checkpoint = open_checkpoint(packed)
    with pytest.raises(WeightsError, match=r"config\.json"):
        store_files.open_store(
            checkpoint, store_files.GEOMETRY, store_files.NAMES, "auto",
            hidden=store_files.HIDDEN, intermediate=store_files.INNER * 2, gated=True,
        )  # fmt: skip


def test_a_slot_that_is_not_at_a_page_is_filled_too(packed: Path) -> None:
    store = open_packed(packed)
    straight, odd = aligned_buffer(store.slot_bytes), aligned_buffer(store.slot_bytes + 64)[64:]
    store.read((0, 2), straight)
    store.read((0, 2), odd)
    assert torch.equal(straight[: odd.numel()], odd)
