"""Names a better model than the default one where this machine has room for it.

One line on a terminal, never a question. Whether the model can be had is asked beside the work, and
only where somebody looks at a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.machine import is_installed
from coterie.cli.terminal import nbytes, note
from coterie.core.errors import ConfigError, CoterieError

if TYPE_CHECKING:
    from coterie.weights.room import ModelRoom
    from coterie.weights.sources.names import NamedModel

# a model that is slower is no better one; of a CPU whose memory was never measured, the bytes that
# ordinary memory reads about ten times in a second
LEAST_TOKENS_S = 5.0
MOST_CPU_BYTES = 3 * 10**9

# as the planner's own
STALE_AFTER_S = 30 * 24 * 3600.0

# to answer that a file is there
_TIMEOUT_S = 5.0


def add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--yes",
        action="store_true",
        help="without MODEL: take the best model that fits this machine, and fetch it",
    )


def take_better(args: argparse.Namespace) -> None:
    """Makes the best model that fits the one that the command runs, if `--yes` asks for it."""
    if not args.yes:
        return
    if args.model is not None or args.config is not None:
        raise ConfigError("--yes chooses the model: leave out MODEL and --config", param="yes")
    args.model = taken_for(_room(args.device))


def taken_for(room: ModelRoom) -> str | None:
    """The name of the best model that fits, None for the default one; says which it is."""
    model = best_model(room)
    if model is None:
        note(f"coterie: no better model fits ({room}); taking the default one")
        return None
    note(f"coterie: taking {_about(model, room)}")
    return model.name


def offer_better(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> None:
    """Tells `say` in a while which better model fits, if the command runs the default one and
    somebody sees it."""
    if args.model is None and args.config is None and sys.stderr.isatty():
        room = _room(args.device)
        threading.Thread(target=tell_better, args=(room, command, say), daemon=True).start()


def tell_better(room: ModelRoom, command: str, say: Callable[[str], None]) -> None:
    """Tells `say` which better model fits, if there is one and it can be had."""
    model = best_model(room)
    if model is not None and _can_be_had(model):
        say(offer_line(model, room, command))


def offer_line(model: NamedModel, room: ModelRoom, command: str) -> str:
    return f"better: {_about(model, room)}: coterie {command} {model.name}"


def _about(model: NamedModel, room: ModelRoom) -> str:
    speed = _tokens_s(model, room)
    rate = "" if speed is None else f", <{speed:.0f} tok/s"
    return f"{model.name}, {nbytes(model.nbytes)}, {model.licence}{rate}"


def _room(device: str | None) -> ModelRoom:
    from coterie.weights.room import model_room

    return model_room(device or "auto")


def best_model(room: ModelRoom) -> NamedModel | None:
    """The best model of the table that can be opened, fits memory and disk, and is not slow."""
    from coterie.weights.sources.names import better_models

    fitting = (
        model
        for model in better_models()
        if model.can_open and model.nbytes <= room.weight_bytes and _is_quick(model, room)
    )
    return next((model for model in fitting if _is_here(model) or _fits_disk(model)), None)


def _is_quick(model: NamedModel, room: ModelRoom) -> bool:
    speed = _tokens_s(model, room)
    if speed is not None:
        return speed >= LEAST_TOKENS_S
    return room.is_gpu or model.nbytes * model.active <= MOST_CPU_BYTES


def _tokens_s(model: NamedModel, room: ModelRoom) -> float | None:
    """The most that memory allows: each token reads the active weights. None: never measured."""
    bandwidth = _bandwidth(is_gpu=room.is_gpu)
    return bandwidth and bandwidth / (model.nbytes * model.active)


def _bandwidth(*, is_gpu: bool) -> float | None:
    """Bytes in a second of the memory that weights lie in, as the planner measured them last."""
    from coterie.weights.home import state_dir

    found = {}
    for path in (state_dir() / "machine").glob("*.json"):
        try:
            machine = json.loads(path.read_bytes())
            if _is_valid(machine, is_gpu=is_gpu):
                name = "device_bytes_s" if is_gpu else "dram_bytes_s"
                found[float(machine["measured_at"])] = float(machine[name])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # of another version, or being written
            continue
    return found[max(found)] if found else None


def _is_valid(machine: dict[str, Any], *, is_gpu: bool) -> bool:
    """Whether a file of coterie.moe.planner.machine is of this machine, young and undisturbed. The
    planner itself is not asked: it needs torch, which a server's first process never imports."""
    from coterie.workers.memory import cores, cpu_name

    identity, mark = machine["identity"], machine["marks"].get("machine", {})
    is_own = (identity["cpu"], identity["cores"]) == (cpu_name(), cores())
    is_young = 0 <= time.time() - machine["measured_at"] < STALE_AFTER_S
    is_kind = (identity["device"] != "cpu") == is_gpu
    return is_own and is_young and is_kind and not mark.get("disturbed")


def _is_here(model: NamedModel) -> bool:
    from coterie.weights.sources.source import find_here

    return find_here(model.name) is not None


def _fits_disk(model: NamedModel) -> bool:
    from coterie.weights.home import models_dir

    folder: Path = models_dir()
    while not folder.exists():
        folder = folder.parent
    return model.nbytes <= shutil.disk_usage(folder).free


def _can_be_had(model: NamedModel) -> bool:
    """Whether it is on this machine, or the hub has it and can be reached."""
    from coterie.weights.sources import hub

    try:
        if _is_here(model):
            return True
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        if offline or not is_installed("huggingface_hub"):
            return False
        return hub.has_file(hub.parse(model.source.removeprefix("hf:")), model.file, _TIMEOUT_S)
    except CoterieError:
        return False
