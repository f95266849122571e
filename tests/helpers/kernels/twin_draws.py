"""Draws of a device by the plain twins of its kernels, on any device."""

from __future__ import annotations

from torch import Tensor

from coterie.engine.sampler import score_tensors
from coterie.kernels.draws import DrawParameters, LogitEdits
from coterie.kernels.reference.sample import edit_rows, note_tokens, sample_rows


class TwinDraws:
    def __init__(self) -> None:
        self.num_edits = self.num_unknown = 0

    def draw(
        self,
        logits: Tensor,
        parameters: DrawParameters,
        noise: Tensor,
        need: str,
        out: Tensor | None = None,
    ) -> Tensor:
        if need == "greedy":
            assert (parameters.temperature == 0).all()
        if need != "filtered":
            assert not (parameters.top_k > 0).any() and not (parameters.top_p < 1).any()
        drawn = sample_rows(logits, parameters, noise)
        return drawn if out is None else out.copy_(drawn)

    def edit(self, logits: Tensor, edits: LogitEdits, unknown: Tensor | None, copy: bool) -> Tensor:
        self.num_edits += 1
        if unknown is not None:
            self.num_unknown += 1
            note_tokens(unknown, edits)
        edited = edit_rows(logits, edits)
        return edited if copy else logits.copy_(edited)

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
        return score_tensors(logits, tokens, num_top)
