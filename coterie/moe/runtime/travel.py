"""How an expert that is not on the device reaches a step with a prompt: copied ahead of the step
(`layer_stream`), or read over the link by the kernels if a row chooses it.

Copies are faster and run beside the computation, but may take what nobody chooses. A kernel reads
an expert once for every few rows, and only when its gate has chosen. Prompts of some length use
nearly every expert, and all that is missing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# rows of one expert that a kernel computes at a time, in steps of few rows
READ_ROWS = {"fp32": 16, "bf16": 16, "int8": 16, "int4": 8}
# Up to this mean number of rows of an expert these kernels run. They are the same wherever the
# experts are, so that the answers are the same too; with more rows all experts are copied.
MOST_ROWS = 6
# rows that the first guess (all experts are equally likely) counts as, and rows after which half of
# what was seen is forgotten
_GUESSED_ROWS, _HALF_LIFE_ROWS = 64, 65_536


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bytes per second, measured: copies to the device, and kernels that read mapped memory."""

    copy: float
    read: float


class ExpertChances:
    """How likely a row is to choose each expert, from the steps so far."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self._top_k, self._rows = top_k, float(_GUESSED_ROWS)
        self._counts = np.full((layers, experts), top_k / experts * _GUESSED_ROWS)

    def observe(self, rows: NDArray[np.int64]) -> None:
        """Rows per expert [layers, experts] of a step."""
        seen = float(rows[0].sum()) / self._top_k
        kept = 0.5 ** (seen / _HALF_LIFE_ROWS)
        self._counts = self._counts * kept + rows
        self._rows = self._rows * kept + seen

    def reads(self, rows: int, read_rows: int) -> NDArray[np.float64]:
        """How often kernels read each expert in a step of so many rows, as expected."""
        share = np.minimum(self._counts / self._rows, 1.0)
        used: NDArray[np.float64] = 1.0 - (1.0 - share) ** rows
        return np.maximum(used, share * rows / read_rows)

    def copied_ahead(self, rows: int, kind: str, rates: LinkRates) -> NDArray[np.bool_]:
        """[layers, experts]: those that are copied, if they are missing, because that is expected
        to take less time. `kind`: the experts' precision."""
        if rows * self._top_k > MOST_ROWS * self._counts.shape[1]:
            return np.ones(self._counts.shape, dtype=bool)
        wanted: NDArray[np.bool_] = self.reads(rows, READ_ROWS[kind]) * rates.copy > rates.read
        return wanted
