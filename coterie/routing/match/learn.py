"""Learns a catalog's probes in a process of its own: `python -m coterie.routing.match.learn`.

The gateway must not be inside a product of matrices on a thread. It is asked once, with the catalog
as JSON, and answers with the packed probes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.child_protocol import ChildDied, ChildNotStarted, ChildPool, ChildProgram, serve
from coterie.core.errors import InternalError
from coterie.core.spawn import environment
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import Matcher, learn_probes
from coterie.routing.match.probe_store import LearntProbes, digest_of, packed, read, unpacked, write

SUFFIX = ".probes"
# until its imports are done, on a busy machine too
START_S = 120.0


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
    question = json.dumps([_encoded(profile) for profile in profiles]).encode()
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


def _decoded(told: list[list[str] | str]) -> AdapterProfile:
    name, description, keywords, examples, counterexamples = told
    card = AdapterCard(str(name), "", "", "", (), 0, 0, 0.0, description=str(description))
    return AdapterProfile(card, tuple(keywords), tuple(examples), tuple(counterexamples))


def main() -> None:
    serve(lambda first: _learnt)


def _learnt(question: bytes) -> bytes:
    profiles = [_decoded(told) for told in json.loads(question)]
    return packed(learn_probes(profiles, EMBEDDERS[DEFAULT]()))


if __name__ == "__main__":
    main()
