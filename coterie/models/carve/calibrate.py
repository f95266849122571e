"""Runs a dense model over calibration text, layer by layer, and divides each layer into experts.

Only one layer's weights are in memory at a time. Held-out text runs at the same time with different
numbers of active experts, which gives the perplexities of the report.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer
from coterie.kernels.linear import ReferenceLinear
from coterie.kernels.reference import layers as reference
from coterie.models.arch.carved import DENSE
from coterie.models.build.assemble import decoder_shape
from coterie.models.build.layers import read_embedding_and_head, read_layer
from coterie.models.build.reader import TensorPlacement, TensorReader
from coterie.models.carve.carve import CarvingPlan, LayerCut, cut_layer

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.weights.checkpoint import Checkpoint

_BLOCK = 16

# (rows into the MLP [T, D], activations [T, I]) -> activations
Change = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MeasuredPerplexity:
    """Perplexity on one held-out text; active None is the dense model."""

    text: str
    active: int | None
    perplexity: float


class LayerCarver:
    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        if spec.architecture not in DENSE or spec.mlp_bias:
            raise WeightsError(
                f"{checkpoint.path}: only {', '.join(DENSE)} without biases in the MLP can be "
                f"carved, not {spec.architecture}. Use another model."
            )
        self._spec, self._shape = spec, decoder_shape(spec)
        self._reader = TensorReader(
            checkpoint, spec, "fp32", TensorPlacement("reference", "cpu", torch.float32)
        )
        self._cos, self._sin = spec.rotary.tables()
        self._ends = read_embedding_and_head(self._reader)
        self.measured: list[MeasuredPerplexity] = []

    @torch.inference_mode()
    def cuts(
        self,
        carving: CarvingPlan,
        calibration: Tensor,
        held_out: dict[str, Tensor],
        actives: Sequence[int],
    ) -> Iterator[LayerCut]:
        """One cut per layer. Texts are windows of token ids [windows, tokens]. At the end,
        `measured` has the perplexities of `held_out` for each number of active experts."""
        main = _Stream(calibration, self._ends.embedding)
        tried: list[tuple[str, int | None, _Stream]] = [
            (name, active, _Stream(ids, self._ends.embedding))
            for name, ids in held_out.items()
            for active in (None, *actives)
        ]
        for index in range(self._spec.num_layers):
            layer = read_layer(self._reader, index)
            # this model gets no adapters, and the targets would keep every layer in memory
            self._reader.targets.clear()
            cut = self._cut(main, layer, carving)
            for _, active, stream in tried:
                self._pass(stream, layer, _change(cut, active))
            yield cut
        norm = self._reader.vector("model.norm.weight", self._spec.hidden)
        for name, active, stream in tried:
            rows = reference.rms_norm(stream.hidden, norm, self._spec.eps)
            value = _perplexity(rows, stream.ids, self._ends.head)
            self.measured.append(MeasuredPerplexity(name, active, value))

    def _cut(self, stream: _Stream, layer: DecoderLayer, carving: CarvingPlan) -> LayerCut:
        seen: list[tuple[Tensor, Tensor]] = []

        def look(rows: Tensor, activations: Tensor) -> Tensor:
            seen.append((rows, activations))
            return activations

        self._pass(stream, layer, look)
        assert isinstance(layer.down, ReferenceLinear)
        return cut_layer(*seen[0], layer.down.weight, carving)

    def _pass(self, stream: _Stream, layer: DecoderLayer, change: Change) -> None:
        assert layer.post_norm is not None and layer.gate_up is not None and layer.down is not None
        attention = replace(layer, post_norm=None, gate_up=None, down=None)
        shape, ids = self._shape, stream.ids
        blocks = ids.numel() // _BLOCK
        cache = torch.empty(2, blocks, shape.num_kv_heads, _BLOCK, shape.head_dim)
        hidden = reference.decoder(
            shape, [attention], self._cos, self._sin, stream.hidden, [cache], stream.batch
        )
        rows = reference.rms_norm(hidden, layer.post_norm, shape.eps)
        activations = change(rows, reference.silu_mul(layer.gate_up(rows)))
        stream.hidden = hidden + layer.down(activations)


class _Stream:
    """The windows of one text: their ids, and their hidden states after the last layer that ran."""

    def __init__(self, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> None:
        self.ids, self.hidden = ids, embed(ids.flatten())
        count, length = ids.shape
        self.batch = AttentionBatch(
            positions=torch.arange(length).repeat(count),
            slots=torch.arange(count * length),
            query_starts=torch.arange(0, count * length + 1, length, dtype=torch.int32),
            context_lens=torch.full((count,), length, dtype=torch.int32),
            block_tables=torch.arange(count * length // _BLOCK, dtype=torch.int32).view(count, -1),
            block_size=_BLOCK,
        )


def _change(cut: LayerCut, active: int | None) -> Change:
    if active is None:
        return lambda rows, activations: activations
    return lambda rows, activations: activations * cut.mask(rows, active)


def _perplexity(rows: Tensor, ids: Tensor, head: Callable[[Tensor], Tensor]) -> float:
    """Over every token except the first of each window."""
    total = 0.0
    for window, hidden in zip(ids, rows.view(*ids.shape, -1), strict=True):
        logits = head(hidden[:-1]).float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (ids.numel() - len(ids)))


WINDOW = 256
# the most windows of one topic, so that a long text does not displace the others
_WINDOWS_PER_TEXT = 3

_FOLDER = Path(__file__).parent / "texts"


def calibration(tokenizer: Tokenizer, file: Path | None, windows: int = 32) -> Tensor:
    """Token ids [windows, WINDOW]: of `file`, or of the texts that come with the package."""
    if file is None:
        own = _windows(tokenizer, [_own("calibration.txt")], windows, windows)
        topics = _topics(held_out=False)
        if len(own) == windows or not topics:
            return own
        more = _windows(tokenizer, topics, windows - len(own), _WINDOWS_PER_TEXT)
        return torch.cat([own, more])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: cannot be read as UTF-8 text ({error})", param="calibration"
        ) from error
    return _windows(tokenizer, [text], windows, windows)


def held_out(tokenizer: Tokenizer, windows: int = 8) -> dict[str, Tensor]:
    found = {"prose": _windows(tokenizer, [_own("held_out.txt")], windows, windows)}
    topics = _topics(held_out=True)
    if topics:
        found["documentation"] = _windows(tokenizer, topics, windows, 1)
    return found


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _topics(*, held_out: bool) -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship Python without its documentation
        return []
    chosen = [name for name in sorted(topics) if (zlib.crc32(name.encode()) % 4 == 0) == held_out]
    return [topics[name] for name in chosen]


def _windows(tokenizer: Tokenizer, texts: list[str], limit: int, each: int) -> Tensor:
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text)
        cuts = range(0, len(ids) - WINDOW + 1, WINDOW)
        found += [ids[start : start + WINDOW] for start in cuts][:each]
    if not found:
        raise ConfigError(
            f"the calibration text has fewer than {WINDOW} tokens", param="calibration"
        )
    return torch.tensor(found[:limit])
