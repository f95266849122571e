"""Experts beside a CUDA device: all in the host's bank, the strategy's choice also in slots.

Kernels read an expert that is in no slot over the link, where it lies; nothing is decided or waited
for inside a step. Steps with a longer prompt copy ahead what they will read (`prompt_stream`).
Strategies decide between steps, from the experts that the step before used: what
they would have loaded for it is copied beside the next steps and serves the ones after. With no
move pending, a decision changes a table on the device and nothing else.
lru and active_only decode otherwise: the device itself brings what a step misses to slots, inside
the step, and the host follows (`victims`). Prompts then change no slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.kernels.device_record import UNIT_BYTES, device_record
from coterie.moe.dispatch.base import Demand
from coterie.moe.dispatch.table import has_victim_rule
from coterie.moe.runtime.bank_uploads import BankUploads, Loads
from coterie.moe.runtime.cpu_share import open_share
from coterie.moe.runtime.device_pool import DevicePool, PlaceTable, ResidentExperts
from coterie.moe.runtime.layer_stream import buffer_slots
from coterie.moe.runtime.prompt_stream import PromptStream
from coterie.moe.runtime.resident import StepDemands, demands_by_sequence
from coterie.moe.runtime.step import first_uses
from coterie.moe.runtime.tiers import MemoryArena
from coterie.moe.runtime.usage import UsageTally
from coterie.moe.runtime.waiting_loads import WaitingLoads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from coterie.kernels.triton.link_prefetch import LinkPrefetch
    from coterie.moe.dispatch.base import Strategy
    from coterie.moe.runtime.bank_fill import BankFill
    from coterie.moe.runtime.cpu_share import CpuShare
    from coterie.moe.runtime.host_bank import HostBank
    from coterie.moe.runtime.setup import RuntimeParts
    from coterie.moe.runtime.trace import Trace
    from coterie.moe.runtime.usage import UsageTelemetry
    from coterie.moe.runtime.victims import StepVictims
    from coterie.moe.store.base import Key


# experts about which strategies decide while a step decodes: those of four rows of a large model
_AT_ONCE = 1536
# waiting experts that are copied at one time, twice behind a step: no token waits long for them
_WAITED_AT_ONCE = 24
# but once behind a prompt as many as take this part of the time of its own copies
_BEHIND_PROMPT = 1 / 3


class BankedExperts:
    """Only the engine's thread may call it."""

    def __init__(self, parts: RuntimeParts, bank: HostBank, telemetry: UsageTelemetry) -> None:
        self._parts, self._bank, self._telemetry = parts, bank, telemetry
        geometry, store = parts.store.geometry, parts.store
        self._geometry, self._slots, self._tier = geometry, parts.slots, parts.device
        layouts = {layer: store.layout(layer) for layer in geometry.layers}
        records = {layer: device_record(layout) for layer, layout in layouts.items()}
        known = {layer: record for layer, record in records.items() if record is not None}
        self._record_bytes = np.array([known[layer].nbytes for layer in geometry.layers])
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        self._table = PlaceTable(geometry, parts.device, bank)
        sizes = {layer: record.nbytes for layer, record in known.items()}
        self._uploads = BankUploads(bank, parts.device, self._table, sizes)
        experts = ResidentExperts({}, layouts, self._table.on_device())
        self.pool = DevicePool(
            self._table.arena, None, self._table.places, self._table.tiers, known, experts, bank
        )
        # bytes per second from the bank
        self.link_rate = float("inf")
        self._waiting = WaitingLoads(parts.slots, parts.device)
        # how many of them may be copied at one time once a step without a prompt is launched
        self._behind_prompt, self._is_copying = 0, False
        # until the bank is full; and until the last step that waited for it is counted
        self._fill: BankFill | None = None
        self._waits: BankFill | None = None
        # decisions about steps in order, each in parts, and what was exchanged since `record` told
        self._undecided: deque[Iterator[int]] = deque()
        self._exchanged = 0
        # lru and active_only: the device places what a decode step misses, the host follows
        self._victims: StepVictims | None = None
        # computes a part, if the pool has it
        self._share: CpuShare | None = None
        # what the prefetches tell the host
        self._told: MemoryArena | None = None
        self.prompts: PromptStream | None = None
        if parts.device.buffers:
            self.prompts = PromptStream(geometry, known, parts.device, self._table, bank)
            self._uploads.near = self.prompts.record

    def start(self, wait_s: float | None = None) -> None:
        """Fill the bank, and the slots that strategies want full before the first request. What is
        not read after `wait_s` is read while requests are served (`loading_pool`)."""
        fill = self._fill = self._waits = self._bank.begin_fill()
        # steps may be captured from now on, and contain what belongs to the pool by then
        self._share = open_share(self._bank, self._geometry, self.pool.records)
        victims = self._step_victims() if self._tier.device.type == "cuda" else None
        self.pool = replace(
            self.pool,
            share=self._share,
            victims=victims,
            prefetch=self._open_prefetch() if victims is None else None,
        )
        fill.wait(wait_s)
        with fill.paused():
            self._measure_link()
        self.loading_pool()

    def _open_prefetch(self) -> LinkPrefetch | None:
        """Where the tier has a buffer for it, behind those of prompts; without one, hints for the
        CPU alone."""
        tier, (record, *others) = self._tier, self.pool.records.values()
        first = tier.num_slots + buffer_slots(self._geometry)
        hint, buffer = None if self._share is None else self._share.hint, None
        if tier.num_slots + tier.buffers > first:
            buffer = tier.arena[first * tier.slot_bytes :][: tier.slot_bytes]
        decode = self._parts.strategies["decode"]
        asked = self._parts.predict in ("auto", "prefetch") and not decode.context.deterministic
        hints = hint is not None and asked
        if any(each != record for each in others) or (buffer is None and not hints):
            return None
        from coterie.kernels.triton.expert_gemv import RANKED
        from coterie.kernels.triton.link_prefetch import SUMS, LinkPrefetch

        own, layers = self.pool.arena, len(self._geometry.layers)
        if buffer is None:
            # copies alone are counted
            told = torch.zeros(SUMS, dtype=torch.int64)
            few = self._geometry.num_experts <= RANKED
            return LinkPrefetch.new(own, None, record, layers, told, hint) if few else None
        self._told = MemoryArena(8 * SUMS, pinned=tier.device.type == "cuda")
        if tier.device.type == "cuda" and not self._told.pinned:
            return None
        told = self._told.view(0, 8 * SUMS).view(torch.int64)
        return LinkPrefetch.new(own, buffer, record, layers, told, hint)

    def _measure_link(self) -> None:
        """The bank need not be full: rates do not depend on what is read."""
        self.link_rate = self._uploads.measure_link(self._geometry.keys())
        if self.prompts is not None:
            self.prompts.measure(self.pool)
            # of copies that are not interrupted
            self.link_rate = max(self.link_rate, self.prompts.rates.copy)

    def _measure_cpu(self) -> None:
        """Only when nothing is read any more, which takes all cores."""
        # kernels read over the link slower than copies
        read = self.link_rate if self.prompts is None else self.prompts.rates.read
        if self._share is not None and not self._share.start(read):
            # steps that were captured before still ask, and get nothing
            ahead = self.pool.prefetch
            if ahead is not None and ahead.buffer is None:
                ahead = None
            self.pool = replace(self.pool, share=None, prefetch=ahead)

    def loading_pool(self) -> DevicePool | None:
        """For a step while the bank is filled: each layer waits for what it uses. None: the bank
        is full, and strategies decide from now on."""
        if self._fill is None:
            return None
        if not self._fill.is_complete:
            return replace(self.pool, share=None, victims=None, prefetch=None, loading=self._fill)
        self._fill.close()
        self._fill = None
        self._measure_cpu()
        for strategy in dict.fromkeys(self._parts.strategies.values()):
            self._uploads.start(strategy.start())
        self._publish()
        if self._victims is not None:
            self._victims.send()
        return None

    @property
    def fill(self) -> BankFill | None:
        """What is still filled."""
        return self._fill

    def wait_loaded(self) -> None:
        if self._fill is not None:
            self._fill.wait()
            self.loading_pool()

    def _step_victims(self) -> StepVictims | None:
        """Places what decode steps miss, where a kernel knows the strategy's rule."""
        from coterie.moe.runtime.victims import StepVictims

        prefill, decode = (self._parts.strategies[phase] for phase in ("prefill", "decode"))
        sizes, table, tier = set(self._record_bytes.tolist()), self._table, self._tier
        # slots that KV may take are the host's to give
        is_fixed = self._parts.slabs is None
        known = has_victim_rule(prefill, decode, self._slots.num_slots)
        if not is_fixed or not known or len(sizes) > 1:
            return None
        places, tiers = table.places.view(-1), table.tiers.view(-1)
        units = tier.slot_bytes // UNIT_BYTES
        self._victims = StepVictims(decode, places, tiers, table.in_bank(), units, sizes.pop())
        return self._victims

    def prompt_pool(self, rows: int) -> DevicePool | None:
        """For a step of so many rows, of which some are of a prompt: copies begin now. None: its
        kernels read what is missing from the bank, as in any step."""
        if self.prompts is None or self._fill is not None:
            return None
        self._end_prompt()
        if self._victims is not None and self._victims.launched != self._victims.followed:
            # the prompt's own table must have all that steps under way have changed
            self._read_slots()
        found = self.prompts.pool(self.pool, rows, self._free_loads, self._uploads.near_read)
        if found is not None:
            # until the step has run, these are in no slot; the step itself has its own table
            self._uploads.begin(self.prompts.kept)
            self._placed()
        return found

    def _free_loads(self, copied: NDArray[np.bool_]) -> Loads:
        """What the next step with a prompt brings to slots while it runs."""
        if self._uploads.is_busy or self._victims is not None:
            return ()
        return self._waiting.take_free(self._row, copied)

    def finish(self) -> None:
        """Slots have what the strategies want."""
        self.wait_loaded()
        self.decide()
        self._end_prompt()
        self.move((), most_waited=self._geometry.total)
        self._publish()

    def withdraw(self, slots: Sequence[int]) -> None:
        """Later steps neither read nor write these slots: they wait for copies that do."""
        self.decide()
        self._end_prompt()
        self._publish()
        self._slots.withdraw(slots)
        self._uploads.vacate(slots)
        self._placed()

    def _end_prompt(self) -> None:
        """Later steps find what the last one with a prompt has brought."""
        if self.prompts is None or not self.prompts.kept:
            return
        kept, self.prompts.kept = self.prompts.kept, ()
        if self.prompts.stream.is_complete:
            self._uploads.end(kept)
            self._placed()
        else:
            self._uploads.undo(kept)
            self._waiting.add(kept)

    def record(self, found: ResidentExperts, demands: StepDemands, seconds: float) -> int:
        """Count a step, then let the strategy move experts for later ones; behind a prompt, whose
        many experts take long to decide about, not before `decide`. Returns how many strategies
        exchanged because of a higher score since the last call."""
        if self._victims is not None:
            self._follow(self._victims, found, demands, seconds)
            return 0
        self._count(found, demands, seconds)
        if self._fill is not None:
            return 0
        if self.pool.share is not None:
            self.pool.share.follow()
        self._publish()
        self._end_prompt()
        if self.prompts is not None and self.prompts.ended(demands.rows):
            self._placed()
        strategy = self._parts.strategies[demands.phase]
        if strategy.settled():
            strategy.observe(demands.rows)
        else:
            copied = 0 if found.copied is None else int(found.copied.sum())
            self._undecided.append(self._decisions(strategy, demands, copied))
            if self.prompts is None or (demands.phase == "decode" and len(self._undecided) == 1):
                self.decide()
        made, self._exchanged = self._exchanged, 0
        return made

    def _follow(
        self, victims: StepVictims, found: ResidentExperts, demands: StepDemands, seconds: float
    ) -> None:
        """Count a step, and do with the host's slots what it did with the device's. Nothing is
        sent: the device's table is ahead."""
        if self.prompts is not None:
            self.prompts.observe(demands.rows)
        number = demands.placed
        if number is None:
            self._count(found, demands, seconds)
            if self.pool.share is not None:
                self.pool.share.follow()
            return
        if number == victims.followed + 1:
            copied, missed = victims.follow(demands.rows)
            # a layer may have taken the slot of an expert that a later one then missed
            served = demands.rows > 0
            for layer, expert in missed:
                served[self._row[layer], expert] = False
            if demands.choices is not None:
                own = demands_by_sequence(demands.choices, range(demands.choices.shape[1]), served)
                demands = replace(demands, by_sequence=own)
            self._count(replace(found, on_device=served), demands, seconds, placed=True)
            self._uploads.follow(copied)
            victims.followed = number
        else:
            self._count(found, demands, seconds, placed=True)
            if number > victims.followed:
                # a step was not counted
                self._read_slots()
        self._placed()

    def _read_slots(self) -> None:
        """Take from the device which experts are in slots."""
        assert self._victims is not None
        self._victims.read()
        tier, slots = self._tier, self._slots
        for slot in range(tier.num_slots):
            lost = tier.key_at(slot)
            if lost is not None and slots.key_at(slot) != lost:
                self._table.to_bank(lost)
                tier.vacate(slot, evicted=True)
        there = ((key, slots.slot_of(key)) for key in list(slots.keys()))
        new = [(key, at) for key, at in there if at is not None and tier.slot_of(key) != at]
        self._uploads.follow(new)

    def launched(self, copies: bool) -> None:
        """A step was enqueued: decide while it is computed; about a part where it takes less time
        than a step that `copies` experts."""
        self._is_copying = copies
        self.decide(None if copies else _AT_ONCE)

    def decide(self, most: int | None = None) -> None:
        """Let strategies decide about steps that have run, until that was done for so many
        experts."""
        spent = 0
        while self._undecided and (most is None or spent < most):
            count = next(self._undecided[0], None)
            if count is None:
                self._undecided.popleft()
            else:
                spent += count

    def _decisions(self, strategy: Strategy, demands: StepDemands, copied: int) -> Iterator[int]:
        """Decide about a step, at once or layer by layer; yields numbers of experts. It has
        `copied` so many."""
        loads: dict[int, Key] = {}
        superseded: list[tuple[Key, int]] = []
        before = strategy.replaced
        whole = strategy.decide_behind(demands.rows, demands.phase)
        if whole is not None:
            loads = {slot: key for key, slot in whole}
            self._exchanged += strategy.replaced - before
        for demand in demands_of(self._geometry.layers, demands) if whole is None else ():
            before = strategy.replaced
            first_uses(self._slots, demand)
            for wave in strategy.decide(demand):
                for key, slot in wave.load:
                    if slot in loads:
                        superseded.append((loads[slot], slot))
                    loads[slot] = key
            self._exchanged += strategy.replaced - before
            yield len(demand.experts)
        wanted, lost = self._still_wanted(strategy, loads, superseded)
        if demands.phase == "prefill" and self.prompts is not None and not lost:
            self._waiting.add(wanted)
            if whole is not None:
                # others want what the prompt's last layers used, and decoding wants something else
                self._behind_prompt = max(self._behind_prompt, int(copied * _BEHIND_PROMPT))
        else:
            self.move(wanted, lost)

    def _still_wanted(
        self, strategy: Strategy, loads: dict[int, Key], superseded: list[tuple[Key, int]]
    ) -> tuple[Loads, Loads]:
        """What the strategy would have loaded during the step and still wants behind the last
        layer; and, of one that loads everything again each time, what it has lost by then."""
        wanted = [(key, at) for at, key in loads.items() if self._slots.slot_of(key) == at]
        if strategy.loads_again:
            kept = set(wanted)
            superseded += [(key, at) for at, key in loads.items() if (key, at) not in kept]
            return wanted, superseded
        return [(key, at) for key, at in wanted if self._tier.slot_of(key) != at], ()

    def move(
        self, loads: Loads, superseded: Loads = (), most_waited: int = _WAITED_AT_ONCE
    ) -> None:
        """Copy experts into their slots, beside the next steps, and some of those that waited: a
        step waits for the copies that were begun two steps before."""
        taken = {slot for _, slot in loads}
        if not self._is_copying:
            most_waited = max(most_waited, self._behind_prompt)
            self._behind_prompt = 0
        waiting = self._waiting.take(most_waited)
        waited = [(key, slot) for key, slot in waiting if slot not in taken]
        loads = (*waited, *loads)
        if not loads and not superseded:
            return
        self._uploads.start(loads, superseded)
        self._placed()
        for key, _ in (*superseded, *loads):
            if self._uploads.near(key) is not None:
                continue
            tally = UsageTally()
            tally.host_hits = 1
            tally.moved_bytes = moved = int(self._record_bytes[self._row[key[0]]])
            tally.io_s = moved / self.link_rate
            self._telemetry.add(key[0], tally)

    def _publish(self) -> None:
        if self._uploads.publish():
            self._placed()

    def _placed(self) -> None:
        """The table has changed."""
        experts = replace(self.pool.experts, on_device=self._table.on_device())
        self.pool = replace(self.pool, experts=experts)

    def _count(
        self,
        found: ResidentExperts,
        demands: StepDemands,
        seconds: float,
        placed: bool = False,
    ) -> None:
        """Time is divided equally by layers; what the link took for the misses is its part.
        `placed`: the device has brought them to slots."""
        used = demands.rows > 0
        hits = (used & found.on_device).sum(axis=1)
        misses = used.sum(axis=1) - hits
        crossed = used & ~found.on_device
        # of the experts that are read: the CPU computes in no step that copies
        part = 0.0 if self.pool.share is None or placed else self.pool.share.part
        if found.copied is not None:
            crossed, part = crossed | found.copied, 0.0
        moved = (crossed.sum(axis=1) * self._record_bytes * (1 - part)).astype(np.int64)
        each = seconds / len(hits)
        # the step was enqueued layer by layer: what it waited for is not in its seconds
        waited, late = ({}, {}) if self._waits is None else self._waits.take_waits()
        self._waits = self._fill
        disk_s, read = np.zeros(len(hits)), np.zeros(len(hits), dtype=np.int64)
        for layer, waited_s in waited.items():
            disk_s[self._row[layer]] = waited_s
        for layer, count in late.items():
            read[self._row[layer]] = count
        for_cpu = 0.0
        if self.pool.share is not None:
            for_cpu = self.pool.share.take_wait_s() / len(hits)
        io_s = moved / self.link_rate
        stall_s = np.minimum(each, io_s)
        cpu_s = np.minimum(each - stall_s, for_cpu)
        whole = self._telemetry.add_step({
            "device_hits": hits, "device_misses": misses, "host_hits": misses - read,
            "host_misses": read, "read_bytes": read * self._record_bytes,
            "moved_bytes": moved, "io_s": io_s, "disk_s": disk_s, "cpu_s": cpu_s,
            "stall_s": stall_s + cpu_s + disk_s, "compute_s": each - stall_s - cpu_s,
        })  # fmt: skip
        if demands.by_sequence is not None:
            self._telemetry.attribute_in_place(demands.by_sequence, whole)

    def wire_rates(self) -> tuple[float, float, float]:
        """Bytes per second as measured at start: copies from the bank, kernels that read it, and
        the CPU (0: it takes no part)."""
        share = self.pool.share
        read = self.link_rate if self.prompts is None else self.prompts.rates.read
        return self.link_rate, read, 0.0 if share is None else share.measured.cpu

    def report_share(self) -> Mapping[str, Any]:
        """What the CPU computes; empty: nothing."""
        return {} if self.pool.share is None else self.pool.share.report()

    def report_prefetch(self) -> Mapping[str, Any]:
        """What was read ahead, in place of what a host predicts; empty: nothing is."""
        prefetch = self.pool.prefetch
        if prefetch is None:
            return {}
        if prefetch.buffer is None:
            return {"why_off": "nothing is copied ahead, and the CPU gets hints"}
        guesses, used, _, wasted = prefetch.told.tolist()
        if not guesses:
            # this model's kernels do not, or no step has decoded yet
            return {"why_off": "no step has guessed"}
        return {
            "predictions": guesses,
            "slot_overlap": used / guesses,
            "prefetched": guesses,
            "useful_prefetches": used,
            "wasted_bytes": wasted * prefetch.tile_bytes,
            "prefetching": True,
            "why_off": "",
        }

    def trace(self, demands: StepDemands, trace: Trace) -> None:
        for demand in demands_of(self._geometry.layers, demands):
            trace.record(demand)

    def close(self) -> None:
        if self._fill is not None:
            self._fill.close()
        self._uploads.close()
        if self._share is not None:
            self._share.close()
        if self._told is not None:
            self._told.close()
        if self.prompts is not None:
            self.prompts.close()
        self._bank.close()


def demands_of(layers: tuple[int, ...], demands: StepDemands) -> Iterator[Demand]:
    """The demands of a step, layer by layer."""
    rows: NDArray[np.int64] = demands.rows
    for layer, own in zip(layers, rows, strict=True):
        used = np.flatnonzero(own)
        yield Demand(layer, demands.phase, tuple(used.tolist()), tuple(own[used].tolist()))
