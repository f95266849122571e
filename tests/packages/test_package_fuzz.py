"""A seeded slice of the fuzz run; all of it behind `full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.adapters.package_fuzz import MUTATIONS, Fuzzer

SLICE = 400


def test_broken_packages_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    figures = Fuzzer(tmp_path, seed=0).run(SLICE)
    assert figures.faults == []
    # both ends must be reached, or the cases say nothing
    assert figures.accepted > SLICE // 50
    assert figures.refusals["WeightsError"] > SLICE // 2
    assert figures.refusals["Forbidden"] > len(MUTATIONS)


def test_the_fuzzer_notices_a_write_outside_the_store(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, seed=0)
    honest = fuzzer.registry.install

    def escaping(*args: object, **named: object) -> object:
        (tmp_path / "escaped").touch()
        return honest(*args, **named)  # type: ignore[arg-type]

    fuzzer.registry.install = escaping  # type: ignore[assignment,method-assign]
    assert any("outside" in fault for fault in fuzzer.run(1).faults)


@pytest.mark.full
def test_ten_thousand(tmp_path: Path) -> None:
    figures = Fuzzer(tmp_path, seed=1).run(10_000)
    assert figures.faults == []
    assert figures.cases == 10_000
