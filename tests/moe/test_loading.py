"""Requests are served while experts are still read for the first time: a layer waits for those that
it uses, and for no other ones."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import numpy as np
import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.moe.runtime import runtime as runtime_module
from coterie.moe.runtime.bank_fill import BankFill
from coterie.moe.runtime.host_bank import HostBank
from coterie.moe.runtime.resident import StepDemands
from coterie.moe.store.base import Key
from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import checkpoint_of
from tests.moe.test_bank import CPU, GEOMETRY, RECORD, DrawnStore, banked_over, wrong_experts


class HeldStore(DrawnStore):
    """Reads of an expert wait until it is let through; some fail."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._open: set[Key] = set()
        self.broken: set[Key] = set()
        self.order: list[Key] = []

    def let(self, *keys: Key) -> None:
        with self._changed:
            self._open.update(keys)
            self._changed.notify_all()

    def read(self, key: Key, out: torch.Tensor) -> int:
        self.order.append(key)
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._open, 20)
        if key in self.broken:
            raise WeightsError(f"{key} is damaged")
        return super().read(key, out)


def held_fill() -> tuple[HeldStore, HostBank, BankFill]:
    store = HeldStore()
    bank = HostBank(cast("Any", store), CPU)
    return store, bank, bank.begin_fill()


def test_a_layer_waits_for_what_it_uses_only() -> None:
    store, bank, fill = held_fill()
    keys = GEOMETRY.keys()
    # all threads are busy with the first ones
    late = keys[-1]
    store.let(*keys[:8], late)
    fill.need(*late[:1], [late[1]])
    assert fill.holds(late) and not fill.is_complete
    assert not fill.wait(0.01)
    # it was read before others that come earlier in the store
    assert store.order.index(late) < len(keys) - 1
    waited, missing = fill.take_waits()
    assert waited[late[0]] > 0 and missing == {late[0]: 1}
    assert fill.take_waits() == ({}, {})
    own = store.arranged(late)
    assert bank.record(*late)[: len(own)].numpy().tobytes() == own
    store.let(*keys)
    assert fill.wait() and fill.num_filled == GEOMETRY.total
    assert fill.read_bytes == store.expert_bytes
    fill.need(1, range(6))
    assert fill.take_waits() == ({}, {})
    fill.close()
    bank.close()


def test_an_expert_that_cannot_be_read_fails_those_who_need_it_and_is_read_again() -> None:
    store, bank, fill = held_fill()
    bad = (2, 3)
    store.broken.add(bad)
    store.let(*GEOMETRY.keys())
    with pytest.raises(WeightsError, match="damaged"):
        fill.need(2, [3])
    # others are not affected
    fill.need(4, [0, 5])
    with pytest.raises(WeightsError):
        fill.wait()
    store.broken.clear()
    fill.need(2, [3])
    assert fill.wait()
    fill.close()
    bank.close()


def test_closing_drops_what_was_not_begun() -> None:
    store, bank, fill = held_fill()
    while len(store.order) < 8:
        time.sleep(0.001)
    closing = threading.Thread(target=fill.close)
    closing.start()
    while not fill._closed:
        time.sleep(0.001)
    store.let(*GEOMETRY.keys())
    closing.join(20)
    # reads that had begun were waited for
    assert not closing.is_alive()
    assert fill.num_filled == len(store.order) < GEOMETRY.total
    bank.close()


def test_steps_run_while_the_bank_is_filled() -> None:
    store = HeldStore()
    # the threads are busy with these while the machine is measured
    store.let(*GEOMETRY.keys()[:8])
    with banked_over(store, "lru", 5, wait_s=0.0) as (banked, parts):
        pool = banked.loading_pool()
        assert pool is not None and pool.share is None
        assert banked.prompt_pool(4096) is None
        rows = np.zeros((3, 6), dtype=np.int64)
        for row, layer in enumerate(GEOMETRY.layers):
            rows[row, [0, 2]] = 1
            threading.Timer(0.02, store.let, [(layer, 0), (layer, 2)]).start()
            with pool.layer(row, torch.tensor([[0, 2]], dtype=torch.int32)):
                assert banked.fill is not None and banked.fill.holds((layer, 2))
        assert banked.record(pool.experts, StepDemands(rows, None), 0.5) == 0
        total, _ = banked._telemetry.end_step()
        # told as a wait for the disk, beside the step's own seconds
        assert 0.02 < total.disk_s <= total.stall_s
        assert total.host_misses >= 1
        assert total.read_bytes == total.host_misses * RECORD.nbytes
        assert total.compute_s + total.stall_s == pytest.approx(0.5 + total.disk_s)
        # nothing is placed from a bank that is not full
        assert not parts.device.keys()
        store.let(*GEOMETRY.keys())
        banked.wait_loaded()
        assert banked.loading_pool() is None and banked.fill is None
        banked.record(banked.pool.experts, StepDemands(rows, None), 0.5)
        assert parts.device.keys()
        banked._publish()
        assert not wrong_experts(store, banked)


@pytest.mark.parametrize("host", ["10%", "40%"])
def test_the_first_token_comes_before_the_loads_of_the_start_end(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(runtime_module, "START_S", 0.0)
    path = checkpoint_of("qwen3_moe")
    with DispatchedModel(Setting(path, "persistent", 24)) as whole:
        want = whole.generate(PROMPTS[2:], 8)[1]
    setting = Setting(path, "hot_cached_static", 12, host, predict="off")
    with SlowStart(setting, 0.03) as few:
        runtime = few.runtime
        running = len(runtime._start_loads)
        assert running > 4
        got = few.generate(PROMPTS[2:], 8)[1]
        assert torch.equal(got, want)
        before = runtime.telemetry.total().read_bytes
        runtime.wait_loaded()
        runtime.end_step()
        assert not runtime._start_loads
        assert runtime.telemetry.total().read_bytes >= before


def test_closing_does_not_wait_for_the_loads_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "START_S", 0.0)
    few = SlowStart(Setting(checkpoint_of("qwen3_moe"), "hot_cached_static", 20, "5%"), 0.25)
    begin = time.perf_counter()
    few.model.close()
    # 20 experts by 4 threads take 1.25 s, those that have begun 0.25 s
    assert time.perf_counter() - begin < 1.0


def test_a_load_that_failed_just_before_its_layer_runs_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DispatchedModel(Setting(checkpoint_of("qwen3_moe"), "layer_grouped", 12, "20%")) as few:
        transfer, asked = few.runtime._transfer, threading.Event()
        sweep, failed = transfer.sweep, []

        def fail_once_asked(*_: object) -> int:
            assert asked.wait(20)
            raise OSError(5, "injected")

        def sweep_when_all_have_ended() -> None:
            """The layer has asked for failures before this, when there were none."""
            asked.set()
            for load in transfer._device.pending.values():
                failed.append(load.settle().error is not None)
            sweep()

        with monkeypatch.context() as patch:
            patch.setattr(few.disk, "pread", fail_once_asked)
            patch.setattr(transfer, "sweep", sweep_when_all_have_ended)
            with pytest.raises(WeightsError, match="injected"):
                few.generate(PROMPTS[2:], 2)
        assert any(failed)
        few.runtime.check()
        got = few.generate(PROMPTS[2:], 2)[1]
        few.runtime.check()
    with DispatchedModel(Setting(checkpoint_of("qwen3_moe"), "persistent", 24)) as whole:
        assert torch.equal(got, whole.generate(PROMPTS[2:], 2)[1])


class SlowStart(DispatchedModel):
    """Every read takes so long, from the start on."""

    def __init__(self, setting: Setting, delay_s: float) -> None:
        self._delay_s = delay_s
        super().__init__(setting)

    def _open(self, wanted: Any) -> Any:
        self.disk.delay_s = self._delay_s
        return super()._open(wanted)
