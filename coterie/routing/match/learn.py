"""Learns a catalog's probes in a process of its own: `python -m coterie.routing.match.learn`.

The gateway must not be inside a product of matrices on a thread. One line of JSON comes in, the
packed probes go out. Ends with whoever started it: its input closes then.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import InternalError
from coterie.core.spawn import DEVNULL, PIPE, environment, spawn
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import Matcher, learn_probes
from coterie.routing.match.probe_store import LearntProbes, digest_of, packed, read, unpacked, write

SUFFIX = ".probes"


def kept_at(profiles: Sequence[AdapterProfile], folder: Path) -> Path:
    """Where in `folder` the probes of this catalog are, if they were learnt before."""
    return folder / f"{digest_of(profiles, EMBEDDERS[DEFAULT]().name)}{SUFFIX}"


def kept_matcher(profiles: Sequence[AdapterProfile], folder: Path) -> Matcher:
    """Of what is kept in `folder`, else learnt by a child and kept. For a thread: it may wait."""
    embedder = EMBEDDERS[DEFAULT]()
    path = kept_at(profiles, folder)
    learnt = read(path, len(profiles), embedder.dim)
    if learnt is None:
        found = _by_child(profiles)
        learnt = _checked(found, len(profiles), embedder.dim)
        write(path, found)
    return Matcher(profiles, learnt, embedder)


def _checked(found: bytes, count: int, dim: int) -> LearntProbes:
    try:
        return unpacked(found, count, dim)
    except ValueError as error:
        raise InternalError("the process that learns the experts' probes failed") from error


def _by_child(profiles: Sequence[AdapterProfile]) -> bytes:
    command = [sys.executable, "-m", "coterie.routing.match.learn"]
    child = spawn(command, environment(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps([_encoded(profile) for profile in profiles]).encode() + b"\n")
        child.stdin.flush()
        found = child.stdout.read()
        child.wait()
        return found
    except OSError as error:
        raise InternalError("the process that learns the experts' probes ended") from error
    finally:
        child.kill()
        child.close()


def _encoded(profile: AdapterProfile) -> list[object]:
    card = profile.card
    hints = (profile.keywords, profile.examples, profile.counterexamples)
    return [card.name, card.description, *map(list, hints)]


def _decoded(told: list[list[str] | str]) -> AdapterProfile:
    name, description, keywords, examples, counterexamples = told
    card = AdapterCard(str(name), "", "", "", (), 0, 0, 0.0, description=str(description))
    return AdapterProfile(card, tuple(keywords), tuple(examples), tuple(counterexamples))


def main() -> None:
    line = sys.stdin.buffer.readline()
    Thread(target=_end_with_parent, daemon=True).start()
    profiles = [_decoded(told) for told in json.loads(line)]
    sys.stdout.buffer.write(packed(learn_probes(profiles, EMBEDDERS[DEFAULT]())))
    sys.stdout.buffer.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
