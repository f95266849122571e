"""Every hostile package is refused, typed and with its reason, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.core.errors import WeightsError
from coterie.packages.archive import inspect
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from tests.helpers.adapters import hostile_archives

CASES = hostile_archives.every()


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_the_good_package_is_good() -> None:
    assert inspect(hostile_archives.good()).manifest.name == "sql"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterRegistry]:
    root = tmp_path_factory.mktemp("sandbox")
    registry = AdapterRegistry(root / "deep" / "inside" / "experts")
    return root, registry


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_is_written(
    case: str, sandbox: tuple[Path, AdapterRegistry]
) -> None:
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


def test_the_docs_name_every_file_and_limit() -> None:
    from coterie.packages import paths
    from coterie.packages.tar_stream import LIMITS

    text = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    assert [name for name in sorted(paths._ROOT_FILES) if f"`{name}`" not in text] == []
    sizes = (LIMITS.compressed_bytes >> 30, LIMITS.total_bytes >> 30, LIMITS.text_bytes >> 20)
    told = "{} files, {} GiB compressed, {} GiB in all, {} MiB per text and {} MiB of texts"
    assert told.format(LIMITS.entries, *sizes, LIMITS.texts_bytes >> 20) in text
    assert f"{LIMITS.ratio} times its size" in text
    assert f"more than {paths.MAX_DEPTH} levels or {paths.MAX_NAME_BYTES} bytes" in text
