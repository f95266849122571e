"""Which shapes of the GPU's kernels a model needs: what `coterie tune` measures for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coterie.kernels.size_table import DeviceShape, ExpertPoolShape, MatrixShape
from coterie.models.base import read_spec, stored_dtype
from coterie.models.spec import ModelSpec
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.kinds import BLOCK_KINDS


def model_shapes(path: Path, dtype: str = "auto") -> list[DeviceShape]:
    """Of the model in this file or folder."""
    checkpoint = open_checkpoint(path)
    kept = stored_dtype(checkpoint, "cuda") if dtype == "auto" else dtype
    return gpu_shapes(read_spec(checkpoint), kept)


def gpu_shapes(spec: ModelSpec, dtype: str) -> list[DeviceShape]:
    """`dtype`: the precision that the model is served with."""
    return list(_matrices(spec, dtype)) + list(_experts(spec, dtype))


def _matrices(spec: ModelSpec, dtype: str) -> Iterator[MatrixShape]:
    # learned positions have other kernels
    if spec.rope is None:
        return
    kind = dtype if dtype in ("int8", "int4", *BLOCK_KINDS) else "dense"
    hidden, latent = spec.hidden, spec.latent
    if latent is None:
        q = inner = spec.num_heads * spec.head_dim
        cached = 2 * spec.num_kv_heads * spec.head_dim
    else:
        q, cached = spec.num_heads * (latent.nope + latent.rope), spec.head_dim
        inner = spec.num_heads * latent.value
        if latent.q_rank is not None:
            yield MatrixShape("product", kind, q, latent.q_rank)
            q = latent.q_rank
    yield MatrixShape("product", kind, q + cached, hidden)
    yield MatrixShape("add", kind, hidden, inner)
    widths = [] if spec.moe is None else [spec.moe.shared]
    if spec.moe is None or len(spec.moe.layers) < spec.num_layers:
        widths.append(spec.intermediate)
    for width in filter(None, widths):
        yield MatrixShape("gate_up", kind, 2 * width, hidden)
        yield MatrixShape("add", kind, hidden, width)
    # the head of an int4 model is int8
    yield MatrixShape("product", "int8" if kind == "int4" else kind, spec.vocab, hidden)


def _experts(spec: ModelSpec, dtype: str) -> Iterator[ExpertPoolShape]:
    moe = spec.moe
    if moe is not None and moe.gated and dtype not in BLOCK_KINDS:
        yield ExpertPoolShape(
            dtype, spec.hidden, moe.intermediate, moe.num_experts, moe.gate_rule.top_k
        )
