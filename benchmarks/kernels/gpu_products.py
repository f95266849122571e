"""Products with matrices as a GPU keeps them: times, shares of the bandwidth, errors.

    python3 -m benchmarks.kernels.gpu_products [--kinds q4_k,int4] [--rows 1,8,512] [--tiles]

Each figure is the time of one product in a captured graph of several, whose matrices together are
larger than the device's cache; the least of some replays. Bandwidth: the bytes of the kept form
over that time, beside what a sum over bf16 reads. `exact`: whether the matrix widened to fp32 has
the bits of the file's own values. The error is that of the product against fp64. `--tiles`: the
times of 8 rows by size of the tiles instead, beside a matrix that is widened, best first.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from coterie.kernels.backend import make_linear
from coterie.kernels.linear import Linear
from coterie.kernels.triton import quant_linear
from coterie.kernels.triton.expert_tiles import TileSize
from coterie.kernels.triton.quant_linear import QuantLinear
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import Weight, dense
from tests.helpers.kernels.kernel_inputs import weight

KINDS = ("bf16", "int8", "int4", *BLOCK_KINDS)
# rows x columns
SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192), (4864, 896), (896, 4864))
_COPIED_BYTES, _MOST_COPIES, _REPLAYS = 256 << 20, 40, 12


def seconds(launches: list[Callable[[], object]]) -> float:
    """Of one launch."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    found = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / len(launches))
    return min(found)


def read_bandwidth() -> float:
    buffer = torch.zeros(1 << 30, dtype=torch.bfloat16, device="cuda")
    return buffer.nbytes / seconds([lambda: buffer.sum(dtype=torch.float32)])


def copies_of(made: Linear) -> list[Linear]:
    """The product and others like it, whose matrices have other places."""
    count = max(2, min(_MOST_COPIES, _COPIED_BYTES // made.nbytes))
    if not isinstance(made, QuantLinear):
        return [_dense_copy(made) for _ in range(count)]
    return [QuantLinear.joined([made]) for _ in range(count)]


def _dense_copy(made: Linear) -> Linear:
    from coterie.kernels.linear import ReferenceLinear
    from coterie.weights.quantize import DenseWeight

    assert isinstance(made, ReferenceLinear)
    return ReferenceLinear([DenseWeight(made.weight.clone())], "cuda")


def error_of(product: Linear, values: Tensor, x: Tensor) -> float:
    want = x.double() @ values.double().T
    return ((product(x).double() - want).norm() / want.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,8,512")
    parser.add_argument("--tiles", action="store_true", help="sizes of tiles for 8 rows")
    options = parser.parse_args()
    counts = [int(each) for each in options.rows.split(",")]
    limit = read_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: reads {limit / 1e12:.2f} TB/s"
    )
    print("| matrix | kind | exact | bits | " + " | ".join(f"{n} rows" for n in counts) + " |")
    for height, width in SHAPES:
        for kind in options.kinds.split(","):
            if kind.endswith("_k") and width % 256:
                continue
            if options.tiles:
                print(height, width, kind, *_tiles(kind, height, width), sep="; ", flush=True)
                continue
            print(_line(kind, height, width, counts, limit), flush=True)


@torch.inference_mode()
def _line(kind: str, height: int, width: int, counts: list[int], limit: float) -> str:
    stored: Weight = weight(kind, height, width)
    product, values = make_linear([stored], "triton", "cuda"), dense(stored).to("cuda")
    exact = "-"
    if isinstance(product, QuantLinear):
        exact = "yes" if torch.equal(product.widened(torch.float32), values) else "NO"
    bits = 8 * product.nbytes / (height * width)
    others, cells = copies_of(product), []
    for count in counts:
        x = torch.randn((count, width), device="cuda").bfloat16()
        error = error_of(product, values, x)
        taken = seconds([lambda own=own, x=x: own(x) for own in others])  # type: ignore[misc]
        share = product.nbytes / taken / limit
        cells.append(f"{taken * 1e6:.1f} us ({share:.0%}), {error:.0e}")
    return f"| {height} x {width} | {kind} | {exact} | {bits:.2f} | " + " | ".join(cells) + " |"


@torch.inference_mode()
def _tiles(kind: str, height: int, width: int, rows: int = 8) -> list[str]:
    product = make_linear([weight(kind, height, width)], "triton", "cuda")
    assert isinstance(product, QuantLinear)
    others, x = copies_of(product), torch.randn((rows, width), device="cuda").bfloat16()
    sizes: list[TileSize | None] = [
        TileSize(block, columns, 3, warps)
        for block, columns, warps in itertools.product((16, 32, 64), (128, 256), (2, 4, 8))
    ]
    found = []
    for size in [*sizes, None]:
        with (
            patch.object(quant_linear, "tile_size", lambda *_, size=size: size),
            patch.object(quant_linear, "_in_tiles", lambda *_, size=size: size is not None),
        ):
            found.append((seconds([lambda own=own: own(x) for own in others]), size))  # type: ignore[misc]
    found.sort(key=lambda each: each[0])
    return [
        f"{taken * 1e6:.1f} us " + (f"{s.block}x{s.columns}, {s.warps} warps" if s else "widened")
        for taken, s in found
        if s is None or taken <= 1.3 * found[0][0]
    ]


if __name__ == "__main__":
    main()
