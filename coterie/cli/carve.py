"""`coterie carve`: makes a mixture of experts from a dense model, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import count, fetch
from coterie.cli.terminal import facts, nbytes, progress, table

if TYPE_CHECKING:
    from coterie.models.carve.calibrate import MeasuredPerplexity
    from coterie.models.carve.carve import CarvingPlan

HELP = "cut a dense Llama-family model into experts"
EPILOG = """\
examples:
  coterie carve --out smollm2-moe       the default model: 64 experts, 8 active
  coterie carve MODEL --experts 32 --active 4 --report         with perplexity
  coterie run smollm2-moe --strategy lru --cache-capacity 480 --prompt "Hello"

With every expert active the result computes what the dense model does. With
fewer it is worse, by as much as --report says: nothing is trained.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="path, pypi:NAME or hf:ORG/REPO, a dense model"
    )
    parser.add_argument("--experts", type=count, default=64, metavar="N", help="in each layer")
    parser.add_argument("--active", type=count, default=8, metavar="N", help="run per token")
    parser.add_argument(
        "--shared", type=int, metavar="N", help="neurons that are always on (default: a third)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: MODEL-carved-ExA here")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="UTF-8 text to group by")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--report", action="store_true", help="perplexity against active experts, held-out text"
    )


def execute(args: argparse.Namespace) -> int:
    from coterie.models.base import read_spec
    from coterie.models.carve.calibrate import LayerCarver, calibration, held_out
    from coterie.models.carve.carve import plan_carving
    from coterie.models.carve.files import CarvedDirectory
    from coterie.models.text.tokenizer import load_tokenizer
    from coterie.weights.checkpoint import open_checkpoint

    path = fetch(args.model)
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint)
    carving = plan_carving(spec.intermediate, args.experts, args.active, args.shared, args.seed)
    out = args.out or Path(f"{_stem(path)}-carved-{carving.experts}x{carving.active}")
    tokenizer = load_tokenizer(path)
    carver = LayerCarver(checkpoint, spec)
    texts = held_out(tokenizer) if args.report else {}
    cuts = carver.cuts(carving, calibration(tokenizer, args.calibration), texts, _actives(carving))
    with progress("carving") as tick, CarvedDirectory(checkpoint, carving, out) as target:
        for layer, cut in enumerate(cuts):
            size = target.add(layer, cut)
            # all layers have the same size
            tick((layer + 1) * size, spec.num_layers * size)
        target.finish({"perplexity": [_row(item) for item in carver.measured]})
    print(_summary(out, carving))
    if args.report:
        print("\n" + _table(carving, carver.measured))
    return 0


def _stem(path: Path) -> str:
    return path.stem if path.is_file() else path.resolve().name


def _actives(carving: CarvingPlan) -> list[int]:
    """From the requested number, doubling, up to all."""
    numbers = []
    active = carving.active
    while active < carving.experts:
        numbers.append(active)
        active *= 2
    return [*numbers, carving.experts]


def _row(item: MeasuredPerplexity) -> dict[str, object]:
    return {"text": item.text, "active": item.active, "perplexity": round(item.perplexity, 3)}


def _summary(out: Path, carving: CarvingPlan) -> str:
    size = sum(file.stat().st_size for file in out.iterdir())
    share = f"{carving.share(carving.active):.0%} of the neurons"
    return facts(
        [
            ("written", f"{out} ({nbytes(size)})"),
            ("experts", f"{carving.experts} of {carving.width} neurons in each layer"),
            ("always on", f"{carving.shared} neurons"),
            ("active", f"{carving.active} experts per token; with the always-on ones {share}"),
        ]
    )


def _table(carving: CarvingPlan, measured: list[MeasuredPerplexity]) -> str:
    texts = list(dict.fromkeys(item.text for item in measured))
    values = {(item.text, item.active): f"{item.perplexity:.1f}" for item in measured}
    rows = []
    for active in dict.fromkeys(item.active for item in measured):
        name = "dense model" if active is None else f"{active} of {carving.experts} experts"
        share = "100%" if active is None else f"{carving.share(active):.0%}"
        rows.append((name, share, *(values[text, active] for text in texts)))
    return table(("", "neurons", *(f"perplexity, {text}" for text in texts)), rows)
