"""Options that several commands share, and how they are turned into settings."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.cli.terminal import note, progress, width
from coterie.core.config import CAPTURES, DTYPES
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.moe import PREDICTIONS, READS, WARMUPS
from coterie.core.sampling import SAMPLING_FIELDS
from coterie.core.settings import parse_budget, parse_bytes

# flags that are fields of MoeSettings; a flag that is not given stays None
MOE_FLAGS = (
    "strategy",
    "device_budget",
    "host_budget",
    "cache_capacity",
    "warmup",
    "workload",
    "predict",
    "reads",
    "deterministic",
    "elastic_memory",
)


_KRASIS = """Flags of the Krasis engine, for scripts that have them; together they stand for a
--strategy, which excludes them. --expert-divisor says how prefill gets its experts,
--cache-strategy how decode does (and prefill, when it is alone), --no-gpu-decode takes decode to
the CPU."""


# of an argument that is a model
MODEL_WORDS = "short name, path, pypi:NAME or hf:ORG/REPO (default: the small model)"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=MODEL_WORDS,
    )
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights (default: auto)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--kv-bytes", type=size, metavar="SIZE", help="KV memory, such as 2GB")


def add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capture-graphs",
        choices=CAPTURES,
        help="when steps are captured on a GPU: before the first request, with the first step of "
        "each size, or never (default: lazy)",
    )


def add_elastic(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--elastic-memory",
        action="store_true",
        default=None,
        help="KV and experts trade device memory while serving",
    )


def add_moe(parser: argparse.ArgumentParser) -> None:
    """Where the experts of a mixture-of-experts model are kept."""
    parser.add_argument("--context", type=count, metavar="N", help="tokens of prompt plus output")
    group = parser.add_argument_group("experts of a mixture-of-experts model")
    add = group.add_argument
    add("--strategy", type=strategy, metavar="NAME", help="NAME, PREFILL+DECODE or auto")
    add("--device-budget", type=budget, metavar="SIZE", help="6GB, or a share such as 25%%")
    add("--host-budget", type=budget, metavar="SIZE", help="RAM for experts; 0 = none")
    add(
        "--cache-capacity",
        type=count,
        metavar="N",
        help="experts on the device, instead of its budget",
    )
    add("--warmup", choices=WARMUPS, help="before the first request (default: heatmap)")
    add("--workload", metavar="NAME", help="names the heatmap (default: default)")
    add("--predict", choices=PREDICTIONS, help="use of the next layer's guess (default: auto)")
    add("--reads", choices=READS, help="how the disk is read (default: auto)")
    add("--deterministic", action="store_true", default=None, help="fix each expert's place")
    add_elastic(group)
    krasis = parser.add_argument_group(
        "the same in Krasis's words",
        textwrap.fill(_KRASIS, width() - 2),
    )
    add = krasis.add_argument
    add(
        "--no-gpu-decode",
        action="store_true",
        help="decode on the CPU: all experts stay in RAM (PREFILL+cpu_only)",
    )
    add(
        "--expert-divisor",
        type=int,
        metavar="N",
        help="prefill: 0 copies each layer's experts for every chunk (chunked), 1 keeps all on "
        "the device (persistent), from 2 on copies them for N layers at once (layer_grouped:N)",
    )
    add(
        "--cache-strategy",
        metavar="NAME",
        help="decode: active_only copies the experts a token needs, static_pin and weighted_pin "
        "keep the hot ones on the device, lru the latest, hot_cached_static keeps the hot ones "
        "there and runs the others on the CPU",
    )


def add_experts(parser: argparse.ArgumentParser) -> None:
    """Experts from `.expert` files and from the registry."""
    group = parser.add_argument_group("experts to answer with")
    group.add_argument(
        "--expert",
        action="append",
        type=named_expert,
        metavar="NAME[=WEIGHT]",
        help="installed name[@version], .expert file or PEFT directory; repeat to stack",
    )
    group.add_argument(
        "--allow-unsigned", action="store_true", help="take .expert files nobody signed"
    )


def named_expert(text: str) -> str:
    from coterie.workers.adapter_names import parse

    try:
        parse(text)
    except CoterieError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text


def moe_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of MoeSettings for which a flag was given."""
    given = {name: getattr(args, name) for name in MOE_FLAGS}
    krasis = _krasis(args)
    if krasis is not None:
        if given["strategy"] is not None:
            raise ConfigError("give --strategy or Krasis's flags, not both", param="strategy")
        given["strategy"] = _known(krasis)
    return {name: value for name, value in given.items() if value is not None}


def _krasis(args: argparse.Namespace) -> str | None:
    """`--expert-divisor` selects prefill, `--cache-strategy` decode (and prefill if given alone),
    `--no-gpu-decode` moves decode to the CPU."""
    divisor, cache = args.expert_divisor, args.cache_strategy
    if divisor is not None and divisor < 0:
        raise ConfigError("--expert-divisor is 0 or more", param="expert_divisor")
    prefill = None
    if divisor is not None:
        prefill = ("chunked", "persistent")[divisor] if divisor < 2 else f"layer_grouped:{divisor}"
    decode = cache
    if cache == "lru":
        # decode keeps compact buffers per layer
        prefill, decode = prefill or "lru", "active_only"
    if args.no_gpu_decode:
        prefill, decode = prefill or cache, "cpu_only"
    named = [name for name in (prefill, decode) if name is not None]
    return "+".join(named) or None


def _known(text: str) -> str:
    if text != "auto":
        from coterie.moe.dispatch.table import parse_strategy

        parse_strategy(text)
    return text


def strategy(text: str) -> str:
    """A known strategy, as it was written."""
    try:
        return _known(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def budget(text: str) -> str:
    try:
        return parse_budget(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=max_tokens,
        metavar="N",
        help=f"most tokens of an answer (default: {max_tokens})",
    )
    for name, metavar, words in (
        ("temperature", "T", "0 = always the likeliest"),
        ("top_p", "P", "draw from this share of mass"),
        ("top_k", "K", "draw from the K likeliest"),
    ):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=sampling_value(name), metavar=metavar, help=words)
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")


def sampling_value(name: str) -> Callable[[str], float]:
    """Reads a value of the sampling field and checks its range."""
    field = SAMPLING_FIELDS[name]

    def read(text: str) -> float:
        try:
            value = int(text) if field.is_whole else float(text)
        except ValueError:
            kind = "whole number" if field.is_whole else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {kind}") from None
        if not field.takes(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {field}")
        return value

    return read


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError("write token ids as 1,2,3") from None


def fetch(model: str | None) -> Path:
    """The model's file, downloaded with a progress bar if it is not on this machine."""
    from coterie.weights.sources.source import DEFAULT_MODEL, resolve

    with progress(f"fetching {model or DEFAULT_MODEL}") as tick:
        return resolve(model, progress=tick, say=lambda line: note(f"coterie: {line}"))
