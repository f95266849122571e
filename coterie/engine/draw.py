"""How one choice draws its tokens: resolved parameters, noise, and the counts of penalties.

Everything here depends only on the request, so a token never depends on the batch, a preemption or
the process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import InvalidRequest
from coterie.core.sampling import SAMPLING_FIELDS, value_of

if TYPE_CHECKING:
    from coterie.core.plan import Assignment
    from coterie.core.request import Sampling
    from coterie.engine.grammar import Constraint

# a lower temperature would overflow: the most likely token is taken instead
MIN_TEMPERATURE = 1e-5
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

_STRIDE, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def noise_key(seed: int, choice: int) -> int:
    """The start of a choice's noise: 64 bits that are independent of those of similar seeds."""
    data = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    digest = blake2b(data, digest_size=8, person=b"coterie-noise").digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.float64]:
    """The noise of token `positions[r]` of the choice with `keys[r]`: uniform in [0, 1).

    SplitMix64 at a given position of its stream, so there is no state between tokens.
    """
    state = keys + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_STRIDE)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    state ^= state >> np.uint64(31)
    # 52 bits, so that the product with a total is always less than the total
    noise: NDArray[np.float64] = (state >> np.uint64(12)) * 2.0**-52
    return noise


def uniform(seed: int, choice: int, position: int) -> float:
    """One number of this noise."""
    return float(uniforms(np.array([noise_key(seed, choice)], dtype=np.uint64), [position])[0])


class RecentTokens:
    """The last tokens of prompt and output, as many as penalties count."""

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self.size = size
        self._tokens = deque(prompt)
        # those of the prompt come first
        self._num_prompt = len(self._tokens)
        self._uses = Counter(prompt)

    def add(self, token: int) -> tuple[int, bool, bool] | None:
        """Add a token of the output. Returns the token that counts no longer, whether it was one of
        the output, and whether it was the last of its kind; None if all still count."""
        self._tokens.append(token)
        self._uses[token] += 1
        if len(self._tokens) <= self.size:
            return None
        oldest = self._tokens.popleft()
        is_output = self._num_prompt == 0
        self._num_prompt -= not is_output
        self._uses[oldest] -= 1
        is_last = not self._uses[oldest]
        if is_last:
            del self._uses[oldest]
        return oldest, is_output, is_last

    def fork(self) -> RecentTokens:
        twin = object.__new__(RecentTokens)
        twin.size, twin._tokens = self.size, self._tokens.copy()
        twin._num_prompt, twin._uses = self._num_prompt, self._uses.copy()
        return twin


# the count of a token that no penalty counts
_NOT_COUNTED = -1


class TokenPenalties:
    """The tokens that occurred and how often they were produced, in growing arrays. With a window
    only the last tokens count; it depends on the tokens alone, so another worker that continues the
    request counts the same."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.repetition = value_of(sampling, "repetition_penalty")
        self.presence = value_of(sampling, "presence_penalty")
        self.frequency = value_of(sampling, "frequency_penalty")
        window = sampling.penalty_window
        if window is not None:
            prompt = prompt[-window:]
        self._recent = None if window is None else RecentTokens(window, prompt)
        seen = np.unique(np.array(prompt, dtype=np.int64))
        # token -> its index in the arrays, which have spare entries
        self._place = {token: place for place, token in enumerate(seen.tolist())}
        self._ids: NDArray[np.int64] = np.concatenate([seen, np.zeros(64, dtype=np.int64)])
        self._counts: NDArray[np.float32] = np.zeros(len(self._ids), dtype=np.float32)
        for token in output:
            self.produced(token)

    def produced(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] = max(self._counts[place], 0) + 1
        left = None if self._recent is None else self._recent.add(token)
        if left is not None:
            oldest, is_output, is_last = left
            place = self._place[oldest]
            self._counts[place] = _NOT_COUNTED if is_last else self._counts[place] - is_output

    @property
    def has_window(self) -> bool:
        return self._recent is not None

    @property
    def entries(self) -> tuple[dict[int, int], NDArray[np.int64], NDArray[np.float32]]:
        """All tokens that occurred, and how often they were produced, -1 = not in the window; with
        the index of each."""
        seen = len(self._place)
        return self._place, self._ids[:seen], self._counts[:seen]

    def fork(self) -> TokenPenalties:
        twin = object.__new__(TokenPenalties)
        twin.repetition, twin.presence = self.repetition, self.presence
        twin.frequency, twin._place = self.frequency, dict(self._place)
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._recent = self._recent and self._recent.fork()
        return twin

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change one row [V] in place: the repetition penalty counts prompt and output, the others
        count the output."""
        seen = len(self._place)
        ids, counts = self._ids[:seen], self._counts[:seen]
        if self._recent is not None:
            counted = counts != _NOT_COUNTED
            ids, counts = ids[counted], counts[counted]
        values = logits[ids]
        if self.repetition != 1.0:
            scale = np.float32(self.repetition)
            values = np.where(values < 0, values * scale, values / scale)
        if self.presence or self.frequency:
            values = values - (self.frequency * counts + self.presence * (counts > 0))
        logits[ids] = values


class BadWords:
    """Token sequences that must not be completed. They are fixed, so another worker that continues
    the request bans the same."""

    def __init__(self, words: Iterable[str], encode: Callable[[str], list[int]]) -> None:
        """`encode` must not add special tokens such as BOS."""
        spelt: dict[tuple[int, ...], None] = {}
        for word in words:
            # most vocabularies have a different token for a word after a space
            for text in (word.lstrip(), " " + word.lstrip()):
                spelt[tuple(encode(text))] = None
        self.sequences = tuple(ids for ids in spelt if ids)

    def banned_behind(self, tokens: Sequence[int], num_prompt: int) -> list[int]:
        """Ids that would complete a banned sequence; the output starts at `num_prompt`."""
        num_output = len(tokens) - num_prompt
        banned = []
        for ids in self.sequences:
            before = len(ids) - 1
            if before <= num_output and tuple(tokens[len(tokens) - before :]) == ids[:-1]:
                banned.append(ids[-1])
        return banned


@dataclass(slots=True, eq=False)
class DrawState:
    """The resolved `Sampling` of one choice. Only the counts of its penalties change.

    Neutral values switch a filter off.
    """

    seed: int
    choice: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    bias_ids: NDArray[np.int64] | None = None
    bias: NDArray[np.float32] | None = None
    penalties: TokenPenalties | None = None
    # ids that are forbidden until the output has `min_output` tokens
    banned: tuple[int, ...] = ()
    min_output: int = 0
    bad_words: BadWords | None = None
    # ascending; None = all tokens may be drawn
    allowed: NDArray[np.int64] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # number of continuations for a beam search; 0 = draw a token
    num_continuations: int = 0
    # its state in the grammar that the output must follow
    constraint: Constraint | None = None

    # derived: is_greedy = the argmax decides; is_plain = the argmax of the raw logits, nothing else
    is_greedy: bool = field(init=False)
    is_plain: bool = field(init=False)
    has_filters: bool = field(init=False)
    # it has to know each token that was produced
    follows_output: bool = field(init=False)
    # the logits may have to be changed before they are used
    may_edit: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_greedy = self.temperature < MIN_TEMPERATURE
        self.follows_output = self.penalties is not None or self.constraint is not None
        edits = (self.bias, self.penalties, self.bad_words, self.allowed)
        self.may_edit = bool(self.min_output) or any(one is not None for one in edits)
        self.has_filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
        self.is_plain = (
            self.is_greedy
            and self.penalties is None
            and self.bias is None
            and self.logprobs is None
            and not self.min_output
            and self.bad_words is None
            and self.allowed is None
            and not self.num_continuations
            and self.constraint is None
        )

    def may_run_ahead(self, num_output: int) -> bool:
        """Whether the host can make its next draw before it knows the token drawn before.
        `num_output` tokens are known."""
        return (
            not self.follows_output
            and self.bad_words is None
            and not self.num_continuations
            and num_output >= self.min_output
        )

    @property
    def is_host_drawn(self) -> bool:
        """Whether no device can make its draws."""
        return (self.typical_p < 1 and not self.is_greedy) or self.num_continuations > 0

    @property
    def needs_host(self) -> bool:
        """Whether the host takes part before or in each of its draws. A device can count a token
        that it drew, but does not know which one leaves the window."""
        has_window = self.penalties is not None and self.penalties.has_window
        return self.is_host_drawn or self.constraint is not None or has_window

    def banned_behind(
        self, tokens: Sequence[int], num_prompt: int, ahead: int = 0
    ) -> Sequence[int]:
        """Ids that must not follow the output, which starts at `num_prompt`; `ahead` tokens of it
        are not known yet."""
        early = self.banned if len(tokens) - num_prompt + ahead < self.min_output else ()
        if self.bad_words is None:
            return early
        return [*early, *self.bad_words.banned_behind(tokens, num_prompt)]

    def produced(self, token: int) -> None:
        """Note one more output token. Raises InvalidRequest if the grammar failed."""
        if self.penalties is not None:
            self.penalties.produced(token)
        if self.constraint is not None:
            self.constraint.sent()
            if self.constraint.error is not None:
                raise InvalidRequest(f"the grammar cannot be followed: {self.constraint.error}")

    def edits(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Whether the logits have to be changed before they are used."""
        if self.bias is not None or self.penalties is not None or self.allowed is not None:
            return True
        return self.constraint is None and bool(self.banned_behind(tokens, num_prompt))

    def edit(self, logits: NDArray[np.float32], tokens: Sequence[int], num_prompt: int) -> None:
        """Change one row [V] in place: bias, penalties, bans, allowed ids.

        With a grammar, the constraint applies the bans: if it allows only banned tokens, they may
        come. The same holds for allowed ids.
        """
        if self.bias is not None:
            logits[self.bias_ids] += self.bias
        if self.penalties is not None:
            self.penalties.apply(logits)
        banned = () if self.constraint is not None else self.banned_behind(tokens, num_prompt)
        allowed = self.allowed
        if allowed is None:
            logits[list(banned)] = -np.inf
            return
        kept = allowed[~np.isin(allowed, banned)] if banned else allowed
        kept = kept if len(kept) else allowed
        values = logits[kept]
        logits[:] = -np.inf
        logits[kept] = values


def make_draw(
    assignment: Assignment,
    choice: int,
    output: Sequence[int],
    stop_ids: Sequence[int],
    constraint: Constraint | None = None,
    bad_words: BadWords | None = None,
) -> DrawState:
    """`output`: what the choice has produced on another worker before."""
    sampling = assignment.sampling
    penalised = any(
        value_of(sampling, name) != SAMPLING_FIELDS[name].default for name in _PENALTIES
    )
    bias = sampling.logit_bias
    allowed = None if sampling.rules is None else sampling.rules.allowed_ids
    return DrawState(
        seed=sampling.seed or 0,
        choice=choice,
        temperature=value_of(sampling, "temperature"),
        top_k=max(int(value_of(sampling, "top_k")), 0),
        top_p=value_of(sampling, "top_p"),
        min_p=value_of(sampling, "min_p"),
        typical_p=value_of(sampling, "typical_p"),
        bias_ids=np.array([token for token, _ in bias], dtype=np.int64) if bias else None,
        bias=np.array([amount for _, amount in bias], dtype=np.float32) if bias else None,
        penalties=TokenPenalties(sampling, assignment.prompt_ids, output) if penalised else None,
        banned=tuple(stop_ids),
        min_output=assignment.limits.min_tokens,
        bad_words=bad_words,
        allowed=None if allowed is None else np.unique(np.array(allowed, dtype=np.int64)),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        constraint=constraint,
    )
