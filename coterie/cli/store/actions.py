"""The actions of `coterie store`. Imports the MoE store when it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import fetch
from coterie.cli.terminal import facts, nbytes, note, progress, table
from coterie.core.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.base import ExpertStore
    from coterie.moe.store.edit import ExpertGroups, PruneResult
    from coterie.moe.store.inspect import ReadSample
    from coterie.weights.checkpoint import Checkpoint


def export(args: argparse.Namespace) -> int:
    from coterie.moe.store.export import export as write
    from coterie.weights.checkpoint import open_checkpoint
    from coterie.workers.warmup import carry_heatmaps

    source = fetch(args.model)
    checkpoint = open_checkpoint(source)
    store = _store_of(checkpoint, args.dtype)
    with progress(f"exporting {args.out}") as tick:
        done = write(checkpoint, store, Path(args.out), tick)
    carry_heatmaps(source, done.path)
    report = {
        "store": str(done.path),
        "experts": len(done.index.records),
        "dtype": done.index.dtype,
        "expert_bytes": done.index.end,
        "backbone_bytes": done.backbone_bytes,
        "resumed": done.resumed,
        "fingerprint": done.index.fingerprint,
    }
    pairs = [
        ("store", str(done.path)),
        ("experts", f"{report['experts']} in {done.index.dtype}, {nbytes(done.index.end)}"),
        ("backbone", nbytes(done.backbone_bytes)),
        ("fingerprint", done.index.fingerprint[:16]),
    ]
    if done.resumed:
        pairs.append(("resumed", f"{done.resumed} experts were there already"))
    return _show(args, report, facts(pairs))


def inspect(args: argparse.Namespace) -> int:
    from coterie.moe.store.inspect import inspect as look

    store = _any_store(args.store)
    layers = store.geometry.layers
    if args.layer is not None and args.layer not in layers:
        raise ConfigError(
            f"layer {args.layer} has no experts; layers {layers[0]} to {layers[-1]} do",
            param="layer",
        )
    heatmap = _counts(args.heatmap, store, fetch(args.store))
    keys = [key for key in store.geometry.keys() if args.layer in (None, key[0])]  # noqa: SIM118
    with progress(f"reading {args.store}") as tick:
        experts = list(look(store, keys, heatmap, tick))
    absent = sorted(key for key in store.geometry.absent if args.layer in (None, key[0]))
    report = {
        "fingerprint": store.fingerprint,
        "experts": [
            {"layer": f.key[0], "expert": f.key[1], "bytes": f.nbytes, "norms": f.norms}
            | ({} if f.count is None else {"count": f.count})
            for f in experts
        ],
        "absent": [list(key) for key in absent],
    }
    parts = list(experts[0].norms) if experts else []
    headers = ["layer", "expert", "size", *[f"|{part}|" for part in parts]]
    headers += ["count"] if heatmap else []
    rows = []
    for f in experts:
        row = [str(f.key[0]), str(f.key[1]), nbytes(f.nbytes)]
        row += [f"{f.norms[part]:#.4g}" for part in parts]
        rows.append(row + ([] if f.count is None else [f"{f.count:.0f}"]))
    lines = [table(headers, rows)] if rows else ["no experts"]
    if absent:
        lines.append(f"absent: {', '.join(f'{layer}/{expert}' for layer, expert in absent)}")
    return _show(args, report, "\n".join(lines))


def verify(args: argparse.Namespace) -> int:
    from coterie.moe.store.inspect import verify as read_all
    from coterie.moe.store.packed import PackedStore

    store = _any_store(args.store)
    with progress(f"verifying {args.store}") as tick:
        result = read_all(store, tick)
    checked = isinstance(store, PackedStore)
    report = {**asdict(result), "checksums": checked, "sound": not result.faults}
    what = "match their checksums" if checked else "can be read (the model has no checksums)"
    text = "\n".join(result.faults) or f"{result.experts} experts {what}, {nbytes(result.nbytes)}"
    _show(args, report, text)
    return 1 if result.faults else 0


def prune(args: argparse.Namespace) -> int:
    from coterie.moe.store.edit import prune as drop
    from coterie.moe.store.packed import open_packed
    from coterie.workers.warmup import carry_heatmaps

    path = _packed(args.store)
    store = open_packed(path)
    heatmap = _heatmap(args.heatmap, store)
    store.close()
    with progress(f"writing {args.out or path}") as tick:
        done = drop(path, heatmap, _groups(path), Path(args.out) if args.out else None, tick)
    if args.out:
        carry_heatmaps(path, done.path)
    total = sum(len(experts) for experts in done.dropped.values())
    report = {
        "store": str(done.path),
        "fingerprint": done.fingerprint,
        "dropped": {str(layer): list(experts) for layer, experts in done.dropped.items()},
        "spared": {str(layer): list(experts) for layer, experts in done.spared.items()},
        "experts": total,
        "bytes": done.freed_bytes,
    }
    return _show(args, report, _pruned(done, total, in_place=args.out is None))


def _pruned(done: PruneResult, total: int, in_place: bool) -> str:
    rows = [
        (str(layer), " ".join(map(str, done.dropped[layer])), " ".join(map(str, spared)) or "-")
        for layer, spared in done.spared.items()
        if done.dropped[layer] or spared
    ]
    lines = [f"{total} experts dropped, {nbytes(done.freed_bytes)}: {done.path}"]
    if rows:
        lines += ["the router may no longer pick:"]
        lines.append(table(("layer", "dropped", "unused, kept for top-k"), rows))
    if total and in_place:
        lines.append("experts.bin keeps its size; --out DIR writes a compact copy")
    return "\n".join(lines)


def replace(args: argparse.Namespace) -> int:
    from coterie.kernels.cpu.expert_record import unpack_record
    from coterie.moe.store.disk import aligned_buffer
    from coterie.moe.store.edit import named_parts, replace_expert
    from coterie.moe.store.packed import read_index
    from coterie.weights.formats.safetensors import read_file

    path, key = _packed(args.store), (args.layer, args.expert)
    index = read_index(path)
    if key not in index.records:
        raise ConfigError(f"{path}: has no expert {key[1]} in layer {key[0]}", param="expert")
    source = Path(args.source)
    if source.suffix == ".safetensors" and source.is_file():
        parts = named_parts(read_file(source), index.layout(key[0]))
    else:
        store = _any_store(args.source)
        if key not in store.geometry.keys():  # noqa: SIM118
            raise WeightsError(f"{args.source}: has no expert {key[1]} in layer {key[0]}")
        record = aligned_buffer(store.slot_bytes)
        store.read(key, record)
        parts = unpack_record(store.layout(key[0]), record)
    edited = replace_expert(path, key, parts)
    report = {"store": str(path), "layer": key[0], "expert": key[1]}
    report |= {"sha256": edited.records[key].sha256, "fingerprint": edited.fingerprint}
    text = f"expert {key[1]} of layer {key[0]} replaced; fingerprint {edited.fingerprint[:16]}"
    return _show(args, report, text)


def profile(args: argparse.Namespace) -> int:
    from coterie.moe.store.inspect import DEPTHS
    from coterie.moe.store.inspect import profile_reads as measure
    from coterie.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(fetch(args.model))
    note("measuring")
    samples = measure(
        lambda reads: _store_of(checkpoint, args.dtype, reads), args.bytes, args.depth or DEPTHS
    )
    report = [
        {**asdict(sample), "first_bytes_s": sample.first_bytes_s, "bytes_s": sample.bytes_s}
        for sample in samples
    ]
    return _show(args, {"samples": report}, _profiled(samples))


def _profiled(samples: list[ReadSample]) -> str:
    rows = []
    for s in samples:
        spent = max(s.read_s + s.checksum_s + s.pack_s, 1e-9)
        shares = [f"{100 * part / spent:.0f}%" for part in (s.read_s, s.checksum_s, s.pack_s)]
        rates = [f"{rate / 1e9:.2f}" for rate in (s.bytes_s, s.first_bytes_s)]
        rows.append((s.reads, str(s.depth), *rates, *shares, f"{1e3 * s.open_s:.0f}"))
    headers = ("reads", "depth", "GB/s", "first", "read", "check", "pack", "open ms")
    return f"{table(headers, rows)}\nfirst: GB/s when every checksum is checked; the shares are its"


def _show(args: argparse.Namespace, report: dict[str, Any], text: str) -> int:
    print(json.dumps(report, indent=1) if args.json else text)
    return 0


def _any_store(model: str) -> ExpertStore:
    """Opens a packed store by its index alone, and any other model by its config."""
    from coterie.moe.store.packed import INDEX_FILE, open_packed
    from coterie.weights.checkpoint import open_checkpoint

    path = fetch(model)
    if (path / INDEX_FILE).exists():
        return open_packed(path)
    return _store_of(open_checkpoint(path), "auto")


def _packed(name: str) -> Path:
    from coterie.moe.store.packed import INDEX_FILE

    path = Path(name)
    if not (path / INDEX_FILE).exists():
        raise WeightsError(
            f"{path}: not a packed store (no {INDEX_FILE}). Make one with coterie store export."
        )
    return path


def _store_of(checkpoint: Checkpoint, dtype: str, reads: str = "auto") -> ExpertStore:
    from coterie.models.build.moe import open_moe_store

    spec = _spec(checkpoint)
    if spec.moe is None:
        raise WeightsError(f"{checkpoint.path}: a dense model, which has no experts.")
    return open_moe_store(checkpoint, spec.moe, spec.hidden, dtype, reads)


def _spec(checkpoint: Checkpoint) -> ModelSpec:
    from coterie.models.base import read_spec

    return read_spec(checkpoint)


def _groups(path: Path) -> ExpertGroups:
    """How the gates of the model group experts."""
    from coterie.moe.store.edit import ExpertGroups
    from coterie.weights.checkpoint import open_checkpoint

    moe = _spec(open_checkpoint(path)).moe
    return ExpertGroups(moe.gate_rule.groups, moe.gate_rule.top_groups) if moe else ExpertGroups()


def _counts(named: str | None, store: ExpertStore, model: Path) -> Heatmap | None:
    """The named heatmap, or that of the default workload next to the model if it fits."""
    if named:
        return _heatmap(named, store)
    from coterie.workers.warmup import heatmap_path

    usual = heatmap_path(model, store.fingerprint, "default")
    try:
        return _heatmap(str(usual), store) if usual.is_file() else None
    except WeightsError as error:
        note(f"coterie: {error.message}")
        return None


def _heatmap(path: str, store: ExpertStore) -> Heatmap:
    """Accepted if it was counted on these experts, or on those they were made from."""
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.weights.files import read_json

    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such heatmap", param="heatmap")
    workload = str(read_json(Path(path)).get("workload"))
    return Heatmap.load(Path(path), store.geometry, lineage=store.lineage, workload=workload)
