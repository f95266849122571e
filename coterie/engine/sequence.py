"""One choice of one request in a lane: the engine's only mutable record."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from coterie.core.plan import AdapterChoice
from coterie.core.request import DEFAULT_PRIORITY
from coterie.engine.draw import DrawState


class SequenceStatus(Enum):
    # a follower has the same prompt as its leader and no blocks until the leader's prefill ends
    FOLLOWING = "following"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


# the unit of fair sharing: a tenant, and whether the priority is above the default
Party = tuple[str, bool]

# (-priority, arrived_at, admission order, choice): the smallest is served first, the largest is
# preempted first
Rank = tuple[int, float, int, int]


class SequenceAdapters(NamedTuple):
    """A stack of adapters and the soft tokens that it puts before a prompt; empty = no adapters."""

    key: str = ""
    adapters: tuple[AdapterChoice, ...] = ()
    # token ids, starting at the size of the vocabulary
    tokens: Seq[int] = ()


BASE = SequenceAdapters()


class TenantShare(NamedTuple):
    """The tenant, and how much of the engine a sequence may take."""

    tenant: str = ""
    # sequences of the tenant that may run at once; 0 = no limit of its own
    max_running: int = 0
    # a tenant with twice the weight gets twice the tokens while both wait
    weight: float = 1.0
    # most tokens of a prompt in one step; 0 = as many as fit
    step_tokens: int = 0


NOBODY = TenantShare()


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` tokens have their keys and values in `blocks`; a step computes the next ones.

    A sequence decodes when only its newest token is not computed yet. A preempted sequence starts
    again at zero and recomputes prompt and output.
    """

    request_id: str
    choice: int
    # prompt, then output; a prompt starts with the soft tokens of its adapters
    tokens: list[int]
    num_prompt: int
    # number of tokens, including the prompt, at which it ends
    max_total: int
    front: SequenceAdapters
    # digest of the scope of its blocks: lane, adapters, tenant
    root: bytes
    rank: Rank
    draw: DrawState
    share: TenantShare = NOBODY
    followers: list[Sequence] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    blocks: list[int] = field(default_factory=list)
    # digests of its full blocks, computed as needed
    chain: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    # tokens that were found in the prefix cache when it first ran
    num_cached: int = 0
    num_preemptions: int = 0
    # its row in the lane's block tables while it runs
    row: int | None = None

    @property
    def adapter_key(self) -> str:
        return self.front.key

    @property
    def num_virtual(self) -> int:
        return len(self.front.tokens)

    @property
    def priority(self) -> int:
        return -self.rank[0]

    @property
    def party(self) -> Party:
        return self.share.tenant, -self.rank[0] > DEFAULT_PRIORITY

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that are not computed yet; 0 while a beam waits for its siblings."""
        return len(self.tokens) - self.num_computed


def rank_of(sequence: Sequence) -> Rank:
    return sequence.rank
