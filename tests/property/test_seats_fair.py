"""Whatever the seats, hot stacks and lengths: no stack waits longer than the rule allows."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.plan import AdapterChoice, stack_key
from coterie.engine.adapter_holds import PATIENCE_STEPS, AdapterHolds
from coterie.engine.draw import DrawState
from coterie.engine.scheduler import Scheduler
from coterie.engine.sequence import Sequence, SequenceAdapters, SequenceStatus
from tests.helpers.models.toy_model import ToyAdapters, make_lane


class Crowd:
    """A hot stack's next request comes before its last one ends: left alone, none runs dry."""

    def __init__(self, num_seats: int, num_hot: int, longest: int, *, grouped: bool) -> None:
        self.pool = ToyAdapters(num_seats, load_ticks=1)
        lane = make_lane(num_blocks=400, max_sequences=32, max_step_tokens=64)
        self.scheduler = Scheduler(lane, AdapterHolds(self.pool), grouped=grouped)
        self.longest, self.half, self.numbers = longest, longest // 2, count()
        self.hot: dict[str, list[Sequence]] = {f"hot{i}": [] for i in range(num_hot)}

    def add(self, name: str, num_output: int) -> Sequence:
        number = next(self.numbers)
        adapters = (AdapterChoice(name, name),)
        sequence = Sequence(
            request_id=f"r{number}",
            choice=0,
            tokens=[1, 2],
            num_prompt=2,
            max_total=2 + num_output,
            front=SequenceAdapters(stack_key(adapters), adapters),
            root=b"",
            rank=(0, float(number), number, 0),
            draw=DrawState(seed=0, choice=0),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        for name, work in self.hot.items():
            work[:] = [one for one in work if one.status is not SequenceStatus.ENDED]
            if max((one.max_total - len(one.tokens) for one in work), default=0) <= self.half:
                work.append(self.add(name, self.longest))
        self.pool.tick()
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is None:
            return
        self.scheduler.commit(plan)
        for sequence in plan.draws:
            sequence.tokens.append(7)
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.end(sequence)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    num_seats=st.integers(1, 4),
    num_hot=st.integers(1, 6),
    num_cold=st.integers(1, 3),
    longest=st.integers(4, 20),
    warm_steps=st.integers(0, 15),
    grouped=st.booleans(),
)
def test_every_stack_is_served_in_bounded_time(
    num_seats: int, num_hot: int, num_cold: int, longest: int, warm_steps: int, grouped: bool
) -> None:
    crowd = Crowd(num_seats, num_hot, longest, grouped=grouped)
    for _ in range(warm_steps):
        crowd.step()
    cold = [crowd.add(f"cold{i}", 3) for i in range(num_cold)]
    # grouped: a step serves one of the seats
    drain = (longest + 3) * (num_seats + 4 if grouped else 1)
    bound = (num_hot + num_cold) * (PATIENCE_STEPS + crowd.pool.HOLD + 2 + drain)
    for _ in range(bound):
        crowd.step()
        if all(one.status is not SequenceStatus.WAITING for one in cold):
            return
    raise AssertionError(f"a stack still waits after {bound} steps")
