"""Every hostile package is refused, typed and with its reason, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.core.errors import WeightsError
from coterie.packages.archive import inspect
from coterie.packages.registry import Registry
from coterie.packages.trust import TrustStore
from tests.packages import hostile

CASES = hostile.every()


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_the_good_package_is_good() -> None:
    assert inspect(hostile.good()).manifest.name == "sql"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Registry]:
    root = tmp_path_factory.mktemp("sandbox")
    registry = Registry(root / "deep" / "inside" / "experts")
    return root, registry


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_written(case: str, sandbox: tuple[Path, Registry]) -> None:
    root, registry = sandbox
    data, words = CASES[case]
    before = tree(root)
    with pytest.raises(WeightsError, match=words):
        registry.install(data, trust=TrustStore(root / "trust.json"), allow_unsigned=True)
    assert tree(root) == before
    assert registry.cards() == []
    assert registry.generation() == 0


def test_a_bomb_costs_no_more_than_its_limit() -> None:
    """Peak memory while three gigabytes are promised."""
    import tracemalloc

    data, _ = CASES["kind: bomb"]
    tracemalloc.start()
    with pytest.raises(WeightsError):
        inspect(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
