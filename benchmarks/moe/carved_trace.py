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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.moe.bank_replay import choices_of

if TYPE_CHECKING:
    from coterie.models.build.moe import MoeRequirements
    from coterie.moe.runtime.runtime import ExpertRuntime
    from coterie.moe.runtime.trace import Trace

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
    from coterie.models.carve.calibrate import calibration, held_out
    from coterie.models.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    held = [row.tolist() for rows in held_out(tokenizer).values() for row in rows]
    texts = [ids for ids in held if len(ids) >= 256][:TEXTS]
    trace = record(options.model, options.dtype, texts, 256 - PROMPT)
    known = calibration(tokenizer, None, 8).tolist()
    heat = record(options.model, options.dtype, known, 128).heatmap()
    top_k = trace.geometry.top_k
    chosen = choices_of(trace, top_k).astype(np.uint8)
    CarvedTrace(chosen, heat.counts.astype(np.uint32)).save(options.out)
    print(f"{chosen.shape} choices, {options.out.stat().st_size / 1e3:.0f} kB")


def record(path: Path, dtype: str, texts: list[list[int]], decode: int) -> Trace:
    """What the gates choose for these texts: a prompt, then its continuation token by token."""
    from coterie.core.moe import MoeSettings
    from coterie.models.base import load_model
    from coterie.models.build.moe import store_of
    from coterie.models.plan_inputs import SingleSequenceRun
    from coterie.moe.runtime.runtime import open_experts
    from coterie.moe.runtime.trace import Trace
    from coterie.weights.checkpoint import open_checkpoint

    settings = MoeSettings(strategy="cpu_only", predict="off")
    opened: list[ExpertRuntime] = []

    def experts(wanted: MoeRequirements) -> ExpertRuntime:
        opened.append(open_experts(store_of(wanted, settings.reads), settings))
        return opened[0]

    model = load_model(open_checkpoint(path), dtype=dtype, experts=experts)
    trace = opened[0].trace = Trace(opened[0].geometry)
    for ids in texts:
        solo = SingleSequenceRun(model, len(ids))
        solo.step(ids[:PROMPT], "prefill")
        model.take_usage()
        for token in ids[PROMPT : PROMPT + decode]:
            solo.step([token], "decode")
            model.take_usage()
    model.close()
    return trace


if __name__ == "__main__":
    main()
