"""`coterie store`: packs a model's experts for fast reads, shows and changes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from coterie.cli.options import count, size
from coterie.cli.store import actions
from coterie.core.config import DTYPES

HELP = "pack, inspect, verify and change the experts of a mixture-of-experts model"
EPILOG = """\
examples:
  coterie store export hf:ORG/REPO packed --dtype int4
  coterie store inspect packed --layer 3
  coterie store verify packed
  coterie store prune packed --heatmap chat.json --out smaller
  coterie store replace packed 3 17 --from tuned
  coterie store profile packed

A packed store is a model directory: every command takes it as MODEL.
coterie store ACTION --help says more.
"""

_EXPORT = """\
examples:
  coterie store export hf:ORG/REPO packed
  coterie store export model.gguf packed --dtype int8

OUT appears when it is complete. After an interruption the same command goes on.
"""
_INSPECT = """\
examples:
  coterie store inspect packed
  coterie store inspect packed --layer 3 --heatmap chat.json --json
"""
_VERIFY = """\
examples:
  coterie store verify packed       exit code 1 when an expert is damaged
"""
_PRUNE = """\
examples:
  coterie store prune packed --heatmap chat.json
  coterie store prune packed --heatmap chat.json --out smaller

Drops the experts that the heatmap never saw; every layer keeps as many as a
token needs.
Without --out the index is rewritten and experts.bin keeps its size.
"""
_REPLACE = """\
examples:
  coterie store replace packed 3 17 --from tuned     that of another model
  coterie store replace packed 3 17 --from expert.safetensors

A file holds gate, up and down (or fc1, fc1_bias, fc2, fc2_bias) as float
tensors.
"""
_PROFILE = """\
examples:
  coterie store profile packed
  coterie store profile hf:ORG/REPO --dtype int4 --bytes 1GB --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(act=None, store_parser=parser)
    choices = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")

    def action(
        name: str, act: Callable[[argparse.Namespace], int], about: str, epilog: str
    ) -> argparse.ArgumentParser:
        made = choices.add_parser(
            name,
            help=about,
            description=about,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)
        return made

    made = action("export", actions.export, "write a packed store", _EXPORT)
    _add_model(made)
    made.add_argument("out", metavar="OUT", help="the directory to make")
    made = action("inspect", actions.inspect, "sizes, norms and counts of experts", _INSPECT)
    made.add_argument("store", metavar="STORE", help="a packed store, or any MoE model")
    made.add_argument("--layer", type=_number, metavar="N", help="one layer only")
    made.add_argument("--heatmap", metavar="FILE", help="counts (default: those beside the model)")
    made = action("verify", actions.verify, "read every expert and check it", _VERIFY)
    made.add_argument("store", metavar="STORE", help="a packed store, or any MoE model")
    made = action("prune", actions.prune, "drop experts a workload never used", _PRUNE)
    made.add_argument("store", metavar="STORE", help="a packed store")
    made.add_argument("--heatmap", required=True, metavar="FILE", help="counts of a workload")
    made.add_argument("--out", metavar="DIR", help="write a copy (default: change STORE)")
    made = action("replace", actions.replace, "put another expert in one's place", _REPLACE)
    made.add_argument("store", metavar="STORE", help="a packed store")
    made.add_argument("layer", type=_number, metavar="LAYER", help="number of the layer")
    made.add_argument("expert", type=_number, metavar="EXPERT", help="number of the expert in it")
    made.add_argument(
        "--from", required=True, dest="source", metavar="SRC", help="a model, or a safetensors file"
    )
    made = action("profile", actions.profile, "measure how fast experts are read", _PROFILE)
    _add_model(made)
    made.add_argument(
        "--bytes", type=size, default=256 << 20, metavar="SIZE", help="read per measurement"
    )
    made.add_argument("--depth", type=count, nargs="+", metavar="N", help="reads under way at once")


def execute(args: argparse.Namespace) -> int:
    if args.act is None:
        args.store_parser.print_help()
        return 0
    status: int = args.act(args)
    return status


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="path, pypi:NAME or hf:ORG/REPO")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the experts")


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
