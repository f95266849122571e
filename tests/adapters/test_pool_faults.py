"""Loads that fail: exactly their stacks, typed, told for a while, tried again later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
from safetensors.torch import load_file, save, save_file

from coterie.adapters import pool as pools
from coterie.adapters.files import AdapterLibrary
from coterie.adapters.kinds.lora import LoraChange
from coterie.adapters.pool import AdapterPool
from coterie.core.errors import CoterieError, NotFound, WeightsError
from coterie.core.plan import stack_key
from tests.helpers.adapters.adapter_pool import (
    PATHS,
    choose,
    delta,
    fetch,
    open_pool,
    put_adapter,
    settle,
    write_lora,
)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def failure(pool: AdapterPool, digest: str) -> CoterieError:
    pool.want(choose(digest))
    key = stack_key(choose(digest))
    assert settle(pool, key) == "failed"
    return pool.failure(key)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_changed_bytes_are_noticed_every_time_they_are_read(tmp_path: Path) -> None:
    good, bad, config = (write_lora(tmp_path, seed) for seed in range(3))
    pool = open_pool(tmp_path, host_bytes=0)
    fetch(pool, choose(bad))
    pool.release(stack_key(choose(bad)))
    flip(tmp_path / bad / WEIGHTS, -100)
    text = (tmp_path / config / CONFIG).read_text()
    (tmp_path / config / CONFIG).write_text(text.replace('"r": 4', '"r": 4 '))
    for digest in (bad, config):
        # what is resident was checked when it was read
        stacks = (*choose(digest), *choose(good))
        pool.want(stacks)
        assert settle(pool, stack_key(stacks)) == "failed"
        problem = pool.failure(stack_key(stacks))
        assert isinstance(problem, WeightsError) and "Install it again" in problem.message
    assert delta(fetch(pool, choose(good))).isfinite().all()
    pool.check()
    pool.close()


def test_files_that_went_away_or_make_no_sense(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    gone = write_lora(tmp_path, 1)
    pool.describe(choose(gone))
    shutil.rmtree(tmp_path / gone)
    assert isinstance(failure(pool, gone), NotFound)
    lost = write_lora(tmp_path, 2)
    pool.describe(choose(lost))
    (tmp_path / lost / WEIGHTS).unlink()
    assert isinstance(failure(pool, lost), WeightsError)
    empty = "ab" * 32
    (tmp_path / empty).mkdir()
    with pytest.raises(WeightsError, match="safetensors"):
        pool.describe(choose(empty))
    pool.close()


def test_adapters_of_another_model(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    wide = write_lora(tmp_path, 1, wide=50)
    assert "another model" in failure(pool, wide).message
    deep = write_lora(tmp_path, 2, paths=["model.layers.7.self_attn.q_proj"])
    assert "no such module" in failure(pool, deep).message
    config = json.loads((tmp_path / wide / CONFIG).read_text())
    broken = put_adapter(tmp_path, config, save({}), "empty")
    assert isinstance(failure(pool, broken), WeightsError)
    assert pool.stats()["adapter_failures"] == 3 and pool.stats()["adapter_resident_bytes"] == 0
    pool.check()
    pool.close()


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    digest = write_lora(tmp_path, 1)
    tensors = load_file(tmp_path / digest / WEIGHTS)
    tensors[f"base_model.model.{PATHS[0]}.lora_A.weight"][0, 0] = float("nan")
    config = json.loads((tmp_path / digest / CONFIG).read_text())
    sick = put_adapter(tmp_path, config, save(tensors), "sick")
    pool = open_pool(tmp_path)
    assert "NaN" in failure(pool, sick).message
    pool.close()


def test_a_failure_is_told_for_a_while_and_then_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = write_lora(tmp_path, 1)
    path = tmp_path / digest / WEIGHTS
    sound = path.read_bytes()
    pool = open_pool(tmp_path)
    pool.describe(choose(digest))
    flip(path, -1)
    assert isinstance(failure(pool, digest), WeightsError)
    path.write_bytes(sound)
    reads = pool.stats()["adapter_failures"]
    assert isinstance(failure(pool, digest), WeightsError)
    assert pool.stats()["adapter_failures"] == reads
    monkeypatch.setattr(pools, "RETRY_S", 0.0)
    assert delta(fetch(pool, choose(digest))).isfinite().all()
    pool.close()


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_FAILED", 3)
    monkeypatch.setattr(pools, "MAX_KNOWN", 8)
    bad = [write_lora(tmp_path, seed, wide=50) for seed in range(6)]
    pool = open_pool(tmp_path)
    for digest in bad:
        failure(pool, digest)
    keys = [stack_key(choose(digest)) for digest in bad]
    assert isinstance(pool.failure(keys[0]), NotFound)
    assert isinstance(pool.failure(keys[-1]), WeightsError)
    for number in range(40):
        pool.describe(choose(bad[0], weight=float(number)))
    assert pool.state(keys[1]) == "failed"
    pool.close()


def test_nothing_of_an_adapter_points_into_its_file(tmp_path: Path) -> None:
    digest = write_lora(tmp_path, 1)
    adapter = AdapterLibrary(tmp_path).load(digest)
    changes = {name: cast("LoraChange", change) for name, change in adapter.changes.items()}
    before = {name: change.a.clone() for name, change in changes.items()}
    path = tmp_path / digest / WEIGHTS
    save_file({name: tensor * 0 for name, tensor in load_file(path).items()}, tmp_path / "zero")
    path.write_bytes((tmp_path / "zero").read_bytes())
    assert before and all((change.a == before[name]).all() for name, change in changes.items())
