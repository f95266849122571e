"""The registry: names, versions, aliases and files, in one process and in several."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
    WeightsError,
)
from coterie.packages.paths import digest_of
from coterie.packages.registry import GRACE_S, AdapterRegistry
from coterie.packages.signing import new_key, public_of, read_key
from coterie.packages.trust import TrustStore
from tests.helpers.adapters.package_files import FINGERPRINT, lora_directory, package, signed_file


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "my.key")
    return tmp_path / "my.key"


@pytest.fixture
def trust(tmp_path: Path, key: Path) -> TrustStore:
    store = TrustStore(tmp_path / "trust.json")
    store.trust(public_of(read_key(key)), "me")
    return store


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    return AdapterRegistry(tmp_path / "state" / "experts")


@pytest.fixture
def install(tmp_path: Path, key: Path, trust: TrustStore, registry: AdapterRegistry) -> Any:
    def one(version: str = "1.0.0", seed: int = 0, now: bool = False, **more: Any) -> Any:
        path = signed_file(tmp_path / f"{version}-{seed}", key, version=version, seed=seed, **more)
        return registry.install(path, trust=trust, now=now)

    return one


def on_disk(registry: AdapterRegistry) -> set[str]:
    return (
        {path.name for path in registry.library.iterdir()} if registry.library.exists() else set()
    )


def test_the_first_version_is_current_and_later_ones_are_staged(
    install: Any, registry: AdapterRegistry
) -> None:
    one = install("1.0.0", description="Writes SQL")
    assert registry.find("sql") == one
    assert digest_of(registry.library / one.digest) == one.digest
    assert (one.kind, one.bases, one.nbytes) == ("lora", (FINGERPRINT,), 520)
    assert registry.manifest(one).description == one.description == "Writes SQL"
    assert (registry.files(one) / "README.md").read_text() == "# An expert\n"
    two = install("1.10.0", seed=2)
    three = install("1.9.0", seed=3)
    assert registry.find("sql") == one
    assert registry.find("sql", "1.9.0") == three
    assert install("1.10.0", seed=2).digest == two.digest and registry.find("sql") == one
    assert install("1.9.0", seed=3, now=True).digest == three.digest
    three = registry.find("sql")
    assert three.version == "1.9.0" and registry.rollback("sql") == one
    two = registry.find("sql", "1.10.0")
    assert registry.versions("sql") == [one, three, two]
    assert registry.cards() == [one, three, two]
    assert list((registry.root / "staging").iterdir()) == []


def test_rollback_goes_back_step_by_step(install: Any, registry: AdapterRegistry) -> None:
    one, two, three = (install(f"1.{n}.0", seed=n, now=True) for n in range(3))
    assert registry.rollback("sql") == two
    assert registry.rollback("sql") == one
    with pytest.raises(NotFound, match="nothing else before"):
        registry.rollback("sql")
    assert registry.find("sql") == one
    registry.alias("sql", "sql", "1.2.0")
    assert registry.find("sql") == three
    assert registry.rollback("sql") == one


def test_aliases(install: Any, registry: AdapterRegistry) -> None:
    one, two = install("1.0.0", seed=1), install("2.0.0", seed=2, now=True)
    registry.alias("prod", "sql", "1.0.0")
    assert registry.find("prod") == one
    assert registry.find("prod", "2.0.0") == two
    registry.alias("prod", "sql")
    assert registry.meanings() == {"prod": two, "sql": two}
    assert registry.rollback("prod") == one
    with pytest.raises(InvalidRequest, match="is an alias"):
        install("1.0.0", seed=1, name="prod")
    other = install("1.0.0", seed=3, name="other")
    with pytest.raises(InvalidRequest, match="name of an installed"):
        registry.alias("other", "sql")
    with pytest.raises(InvalidRequest):
        registry.alias("a:b", "sql")
    registry.unalias("prod")
    with pytest.raises(NotFound):
        registry.unalias("sql")
    assert set(registry.meanings()) == {"other", "sql"}
    assert registry.find("other") == other


def test_a_pinned_name_stays(install: Any, registry: AdapterRegistry) -> None:
    one = install("1.0.0", seed=1)
    assert registry.pin("sql").pinned
    two = install("2.0.0", seed=2, now=True)
    assert registry.find("sql").version == one.version
    assert registry.find("sql").pinned and not registry.find("sql", "2.0.0").pinned
    with pytest.raises(Forbidden, match="pinned"):
        registry.remove("sql")
    # not half of it either, whichever comes first
    registry.alias("sql", "sql", "2.0.0")
    with pytest.raises(Forbidden, match="pinned"):
        registry.remove("sql")
    assert registry.alias("sql", "sql", "1.0.0") == one
    assert len(registry.cards()) == 2
    for card in (one, two):
        assert registry.manifest(card).version == card.version
        assert digest_of(registry.library / card.digest) == card.digest
    registry.remove("sql", "2.0.0")
    registry.pin("sql", False)
    registry.remove("sql")
    assert registry.cards() == [] and two.digest not in on_disk(registry)
    with pytest.raises(NotFound):
        registry.pin("sql")


def test_removal_frees_what_nobody_has(install: Any, registry: AdapterRegistry) -> None:
    one, two = install("1.0.0", seed=1), install("2.0.0", seed=2, now=True)
    copy = install("1.0.0", seed=1, name="copy")
    assert copy.digest == one.digest
    registry.remove("sql", "2.0.0")
    assert on_disk(registry) == {one.digest}
    # the name means what it meant before
    assert registry.find("sql") == one
    registry.remove("sql")
    assert on_disk(registry) == {one.digest}
    registry.remove("copy", keep={one.digest})
    assert on_disk(registry) == {one.digest}
    assert registry.sweep(keep={one.digest}, older_than_s=-1) == []
    assert registry.sweep() == []
    assert registry.sweep(older_than_s=-1) == [one.digest]
    assert on_disk(registry) == set()
    assert list((registry.root / "packages").iterdir()) == []
    with pytest.raises(NotFound):
        registry.remove("sql")
    assert two.digest not in on_disk(registry)


def test_aliases_of_a_removed_version_go_back_or_go(
    install: Any, registry: AdapterRegistry
) -> None:
    one = install("1.0.0", seed=1)
    install("2.0.0", seed=2, now=True)
    registry.alias("prod", "sql", "1.0.0")
    registry.alias("prod", "sql", "2.0.0")
    registry.alias("next", "sql", "2.0.0")
    registry.remove("sql", "2.0.0")
    assert registry.meanings() == {"prod": one, "sql": one}


def test_a_removal_makes_no_staged_version_current(install: Any, registry: AdapterRegistry) -> None:
    one = install("1.0.0", seed=1)
    two = install("2.0.0", seed=2)
    with pytest.raises(Conflict, match=r"2\.0\.0.* staged: promote"):
        registry.remove("sql", "1.0.0")
    assert registry.find("sql") == one
    registry.remove("sql", "2.0.0")
    install("2.0.0", seed=2)
    registry.alias("sql", "sql", "2.0.0")
    registry.remove("sql", "1.0.0")
    assert registry.find("sql").digest == two.digest
    registry.remove("sql")
    assert registry.cards() == [] and registry.meanings() == {}
    assert install("3.0.0", seed=3) == registry.find("sql")


def test_versions_do_not_change(install: Any, registry: AdapterRegistry) -> None:
    one = install("1.0.0", seed=1)
    assert install("1.0.0", seed=1).digest == one.digest
    before = registry.generation()
    with pytest.raises(InvalidRequest, match="other weights"):
        install("1.0.0", seed=2)
    assert registry.generation() == before
    assert on_disk(registry) == {one.digest}


def test_a_damaged_file_is_mended_by_installing_again(
    install: Any, registry: AdapterRegistry
) -> None:
    one = install("1.0.0", seed=1)
    weights = registry.library / one.digest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    install("1.0.0", seed=1)
    assert digest_of(registry.library / one.digest) == one.digest


def test_unsigned_needs_permission_and_is_logged(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = package(tmp_path).source
    directory = lora_directory(tmp_path / "plain")
    for source in (path, directory):
        with pytest.raises(Forbidden, match="not signed"):
            registry.install(source, trust=trust)
    with caplog.at_level(logging.WARNING, logger="coterie"):
        card = registry.install(path, trust=trust, allow_unsigned=True)
    assert card.signer == ""
    assert [record.getMessage() for record in caplog.records] == ["--allow-unsigned used"]
    assert caplog.records[0].__dict__["model"] == "sql@1.0.0"
    named = registry.install(directory, trust=trust, allow_unsigned=True, name="x", version="3.0")
    assert (named.name, named.version) == ("x", "3.0")


def test_a_reload_of_a_directory_is_another_version(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore
) -> None:
    """vLLM's way: the same name again and again, with other weights."""
    cards = [
        registry.install(
            lora_directory(tmp_path / str(seed) / "same", seed),
            trust=trust,
            allow_unsigned=True,
            name="same",
            now=True,
        )
        for seed in range(3)
    ]
    assert len({card.version for card in cards}) == 3
    assert registry.find("same") == cards[2]
    assert registry.rollback("same") == cards[1]


def test_a_package_for_another_base_is_refused(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore, key: Path
) -> None:
    path = signed_file(tmp_path, key)
    with pytest.raises(InvalidRequest, match=r"another base model: for tiny .*abababababab"):
        registry.install(path, trust=trust, bases=["cd" * 32])
    card = registry.install(path, trust=trust, bases=["cd" * 32, FINGERPRINT])
    assert card.bases == (FINGERPRINT,)
    plain = registry.install(
        lora_directory(tmp_path / "plain"), trust=trust, allow_unsigned=True, bases=["cd" * 32]
    )
    assert plain.bases == ("cd" * 32,)


def test_imports_run_but_are_not_listed(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore, install: Any
) -> None:
    directory = lora_directory(tmp_path / "mine", seed=1)
    before = registry.generation()
    card = registry.import_directory(directory)
    assert on_disk(registry) == {card.digest} and registry.cards() == []
    assert registry.generation() == before
    # installed and removed by someone else meanwhile: it stays for those who imported it
    assert install("1.0.0", seed=1).digest == card.digest
    registry.remove("sql")
    assert on_disk(registry) == {card.digest}
    assert registry.sweep(older_than_s=GRACE_S) == []
    assert registry.sweep(older_than_s=-1) == [card.digest]


def test_a_package_can_be_imported_too(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore, key: Path
) -> None:
    card = registry.import_package(signed_file(tmp_path, key), trust=trust)
    assert (card.name, card.bases) == ("sql", (FINGERPRINT,)) and card.signer
    assert registry.cards() == [] and on_disk(registry) == {card.digest}
    unsigned = package(tmp_path, name="plain").source
    assert isinstance(unsigned, Path)
    with pytest.raises(Forbidden):
        registry.import_package(unsigned, trust=trust)


def test_what_is_not_there_is_told_with_what_is(install: Any, registry: AdapterRegistry) -> None:
    install("1.0.0", seed=1)
    install("2.0.0", seed=2)
    with pytest.raises(NotFound, match="Did you mean sql"):
        registry.find("sqll")
    with pytest.raises(NotFound, match=r"has no version '3\.0' here; it has 1\.0\.0, 2\.0\.0"):
        registry.find("sql", "3.0")
    with pytest.raises(NotFound, match="expert list"):
        registry.versions("zzz")


def test_what_a_crash_left_is_swept(install: Any, registry: AdapterRegistry) -> None:
    """Files without rows: an adapter, what came along with one, and a staging folder."""
    one = install("1.0.0", seed=1)
    lost = registry.library / ("f" * 64)
    lost.mkdir()
    (registry.root / "packages" / "lost").mkdir()
    stale, fresh = registry.root / "staging" / "stale", registry.root / "staging" / "fresh"
    for path in (stale, fresh):
        path.mkdir()
    os.utime(stale, (0, 0))
    assert registry.sweep() == []
    # someone may have put it there this moment: it is only noted
    assert lost.exists() and fresh.exists() and not stale.exists()
    assert registry.sweep(older_than_s=-1) == [lost.name]
    assert on_disk(registry) == {one.digest}
    assert [path.name for path in (registry.root / "packages").iterdir()] == [
        registry.files(one).name
    ]


def test_the_generation_tells_other_processes(
    tmp_path: Path, registry: AdapterRegistry, install: Any
) -> None:
    other = AdapterRegistry(registry.root)
    before = other.generation()
    install("1.0.0")
    assert other.generation() == before + 1
    assert other.find("sql").version == "1.0.0"
    other.pin("sql")
    assert registry.generation() == before + 2


def test_a_failed_change_changes_nothing(
    install: Any, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = install("1.0.0", seed=1)
    before = registry.generation()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry._registry_files, "place_package", full)
    with pytest.raises(Unavailable, match="installing failed: No space left"):
        install("2.0.0", seed=2)
    assert registry.cards() == [one] and registry.generation() == before
    assert list((registry.root / "staging").iterdir()) == []


def test_a_database_that_breaks_later_is_told(install: Any, registry: AdapterRegistry) -> None:
    install("1.0.0")
    registry._connection.execute("DROP TABLE meanings")
    for question in (registry.meanings, lambda: registry.find("sql"), registry.cards):
        with pytest.raises(WeightsError, match=r"registry\.db"):
            question()
    with pytest.raises(WeightsError, match=r"registry\.db"):
        registry.pin("sql")
    registry._connection.execute("PRAGMA user_version = 99")
    with pytest.raises(WeightsError, match="newer Coterie"):
        AdapterRegistry(registry.root)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"cannot be written.*COTERIE_HOME"):
        AdapterRegistry(tmp_path / "file" / "experts")


def test_a_damaged_database_is_told(tmp_path: Path) -> None:
    root = tmp_path / "experts"
    root.mkdir()
    (root / "registry.db").write_bytes(b"not a database, but long enough to look like one" * 50)
    with pytest.raises(WeightsError, match="not a database"):
        AdapterRegistry(root)


def _work(root: Path, folder: Path, key: Path, number: int, barrier: Any) -> None:
    trust = TrustStore(folder / "trust.json")
    registry = AdapterRegistry(root)
    barrier.wait()
    for turn in range(6):
        path = signed_file(
            folder / f"{number}-{turn}", key, version=f"{number}.{turn}.0", seed=turn
        )
        registry.install(path, trust=trust)
        registry.alias(f"mine-{number}", "sql", f"{number}.{turn}.0")
        if turn % 2:
            registry.remove("sql", f"{number}.{turn}.0")


def test_two_processes_at_once(
    tmp_path: Path, registry: AdapterRegistry, trust: TrustStore, key: Path
) -> None:
    """The same weights come and go in both; each digest must be there while a version has it."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    arguments = [(registry.root, tmp_path, key, number, barrier) for number in (1, 2)]
    workers = [context.Process(target=_work, args=a) for a in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0, 0]
    expected = {f"{number}.{turn}.0" for number in (1, 2) for turn in (0, 2, 4)}
    cards = registry.cards()
    assert {card.version for card in cards} == expected
    assert on_disk(registry) == {card.digest for card in cards}
    assert all(digest_of(registry.library / card.digest) == card.digest for card in cards)
    assert registry.generation() == 2 * (6 + 6 + 3)


def test_threads_share_one_registry(install: Any, registry: AdapterRegistry) -> None:
    install("1.0.0", seed=1)
    install("2.0.0", seed=2)
    seen: set[str] = set()
    faults: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(200):
                seen.add(registry.find("sql").version)
                registry.generation()
        except BaseException as error:
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(50):
        registry.alias("sql", "sql", f"{1 + turn % 2}.0.0")
    for reader in readers:
        reader.join()
    assert faults == [] and seen <= {"1.0.0", "2.0.0"}


def test_a_clock_that_is_set_back_keeps_nothing_for_ever(
    install: Any, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark of a time that is yet to come was made before."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3 * 365 * 86_400)
    card = install("1.0.0")
    registry.remove(card.name, keep=[card.digest])
    monkeypatch.setattr(time, "time", real)
    assert registry.sweep(older_than_s=GRACE_S) == []
    monkeypatch.setattr(time, "time", lambda: real() + GRACE_S + 60)
    assert registry.sweep(older_than_s=GRACE_S) == [card.digest]
