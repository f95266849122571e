"""Learns a catalog's probes in a child process: `python -m coterie.routing.match.learn`.

No thread of the gateway may run a matrix product. The process is asked once, with the catalog as
JSON, and answers with the packed probes. What it needs for every catalog it stores in the folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.child_protocol import ChildDied, ChildNotStarted, ChildPool, ChildProgram, serve
from coterie.core.errors import InternalError
from coterie.core.spawn import environment
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import Matcher, learn_probes
from coterie.routing.match.probe_store import (
    SUFFIX,
    LearntProbes,
    digest_of,
    packed,
    read,
    stored_inverse,
    unpacked,
    write,
)

# time for its imports, also on a busy machine
START_S = 120.0


def probes_path(profiles: Sequence[AdapterProfile], folder: Path) -> Path:
    """The file in `folder` for the probes of this catalog."""
    return folder / f"{digest_of(profiles, EMBEDDERS[DEFAULT]().name)}{SUFFIX}"


def cached_matcher(profiles: Sequence[AdapterProfile], folder: Path) -> Matcher:
    """Uses the probes in `folder`, or lets a child process learn them and stores them. Blocking:
    call it on a thread."""
    embedder = EMBEDDERS[DEFAULT]()
    path = probes_path(profiles, folder)
    learnt = read(path, len(profiles), embedder.dim)
    if learnt is None:
        data = _by_child(profiles, folder)
        learnt = _checked(data, len(profiles), embedder.dim)
        write(path, data)
    return Matcher(profiles, learnt, embedder)


def _checked(data: bytes, count: int, dim: int) -> LearntProbes:
    try:
        return unpacked(data, count, dim)
    except ValueError as error:
        raise InternalError("the process that learns the experts' probes failed") from error


def _by_child(profiles: Sequence[AdapterProfile], folder: Path) -> bytes:
    question = json.dumps([str(folder), *(_encoded(profile) for profile in profiles)]).encode()
    try:
        return asyncio.run(_learnt_by_child(question))
    except (ChildNotStarted, ChildDied) as error:
        raise InternalError("the process that learns the experts' probes ended") from error


async def _learnt_by_child(question: bytes) -> bytes:
    children: ChildPool[None] = ChildPool(
        ChildProgram("coterie.routing.match.learn", environment(), START_S)
    )
    try:
        return await children.ask(question, None, answer_s=None)
    finally:
        await children.close()


def _encoded(profile: AdapterProfile) -> list[object]:
    card = profile.card
    hints = (profile.keywords, profile.examples, profile.counterexamples)
    return [card.name, card.description, *map(list, hints)]


def _decoded(fields: list[list[str] | str]) -> AdapterProfile:
    name, description, keywords, examples, counterexamples = fields
    card = AdapterCard(str(name), "", "", "", (), 0, 0, 0.0, description=str(description))
    return AdapterProfile(card, tuple(keywords), tuple(examples), tuple(counterexamples))


def main() -> None:
    serve(lambda first: _learnt)


def _learnt(question: bytes) -> bytes:
    folder, *profiles = json.loads(question)
    invert = partial(stored_inverse, folder=Path(folder))
    known = [_decoded(fields) for fields in profiles]
    return packed(learn_probes(known, EMBEDDERS[DEFAULT](), invert))


if __name__ == "__main__":
    main()
