"""The choices of a carved model's gates over real text, as a small file that drives benchmarks.

    coterie carve --experts 128 --active 8 --out carved-128
    python -m benchmarks.moe.carved_trace carved-128 --out benchmarks/moe/carved_128x8.npz

Three held-out texts of 256 tokens, each a prompt of 32 and then its real continuation, token by
token; and counts over calibration texts, from which strategies may know what is used most.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.moe.bank_replay import choices_of

PROMPT, TEXTS = 32, 3


@dataclass(frozen=True, slots=True)
class CarvedTrace:
    # [steps, layers, k]: what each decoded token chose
    chosen: npt.NDArray[np.uint8]
    # [layers, experts]: uses in other texts
    counts: npt.NDArray[np.uint32]

    @staticmethod
    def load(path: Path) -> CarvedTrace:
        with np.load(path, allow_pickle=False) as arrays:
            return CarvedTrace(arrays["chosen"], arrays["counts"])

    def save(self, path: Path) -> None:
        np.savez_compressed(path, chosen=self.chosen, counts=self.counts)

    def with_layers(self, layers: int, seed: int = 0) -> CarvedTrace:
        """For a model of so many layers: of fewer, some of them; of more, some twice, the second
        time with other names of the experts and half of the steps later."""
        own, experts = self.counts.shape
        at = np.arange(layers) * own // layers
        draw = np.random.default_rng(seed)
        chosen, counts = self.chosen[:, at].copy(), self.counts[at].copy()
        for row in range(1, layers):
            if at[row] == at[row - 1]:
                names = draw.permutation(experts).astype(np.uint8)
                late = np.roll(chosen[:, row], -len(chosen) // 2, axis=0)
                chosen[:, row] = names[late]
                counts[row, names] = counts[row].copy()
        return CarvedTrace(chosen, counts)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a carved model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    # whoever only reads a trace needs no model
    from benchmarks.moe.sweep_runs import Bench

    bench = Bench(options.model, options.dtype, PROMPT)
    texts = [ids for ids in bench.texts if len(ids) >= 256][:TEXTS]
    trace = bench.trace(texts, 256 - PROMPT, None)
    heat = bench.trace(bench.known, 128, None).heatmap()
    top_k = trace.geometry.top_k
    chosen = choices_of(trace, top_k).astype(np.uint8)
    CarvedTrace(chosen, heat.counts.astype(np.uint32)).save(options.out)
    print(f"{chosen.shape} choices, {options.out.stat().st_size / 1e3:.0f} kB")
    bench.model.close()


if __name__ == "__main__":
    main()
