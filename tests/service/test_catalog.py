"""service/adapters/catalog.py and leases.py over a real registry: what is seen, when files go."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from coterie.core.adapters import AdapterCard
from coterie.core.errors import Unavailable, UnsupportedFeature
from coterie.core.plan import AdapterChoice
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from coterie.service.adapters.catalog import POLL_S, SETTLE_S, AdapterCatalog
from tests.helpers.adapters.package_files import lora_directory


def remove(registry: AdapterRegistry, card: AdapterCard) -> object:
    return registry.remove(card.name, keep=[card.digest])


def install(registry: AdapterRegistry, folder: Path, name: str, seed: int) -> AdapterCard:
    source = folder / f"source-{name}-{seed}"
    if not source.exists():
        lora_directory(source, seed)
    trust = TrustStore(folder / "trust.json")
    return registry.install(source, trust=trust, allow_unsigned=True, name=name, now=True)


def choice(card: AdapterCard, weight: float = 1.0) -> AdapterChoice:
    return AdapterChoice(f"{card.name}@{card.version}", card.digest, weight)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def run(folder: Path, test: Callable[[AdapterCatalog], Awaitable[None]]) -> None:
    async def main() -> None:
        catalog = AdapterCatalog(folder / "experts")
        await catalog.start()
        try:
            await test(catalog)
        finally:
            # a server closes its pipeline from two sides
            await catalog.close()
            await catalog.close()

    asyncio.run(main())


def test_a_change_elsewhere_shows_up(tmp_path: Path) -> None:
    elsewhere = AdapterRegistry(tmp_path / "experts")

    async def test(catalog: AdapterCatalog) -> None:
        assert list(catalog.names()) == []
        first = await asyncio.to_thread(install, elsewhere, tmp_path, "sql", 1)
        await until(lambda: catalog.find("sql", "") == first)
        second = await asyncio.to_thread(install, elsewhere, tmp_path, "sql", 2)
        await until(lambda: catalog.find("sql", "") == second)
        assert catalog.find("sql", first.version) == first and len(catalog.cards()) == 2
        await asyncio.to_thread(elsewhere.remove, "sql")
        await until(lambda: catalog.find("sql", "") is None)

    run(tmp_path, test)


def test_files_stay_while_somebody_runs_on_them(tmp_path: Path) -> None:
    async def test(catalog: AdapterCatalog) -> None:
        card = await catalog.change(lambda registry: install(registry, tmp_path, "sql", 1))
        library = tmp_path / "experts" / "library"
        one, two = catalog.hold([choice(card)]), catalog.hold([choice(card, 0.5)])
        await catalog.change(lambda registry: registry.remove("sql", keep=[card.digest]))
        # new requests do not find it, those two still have its files
        assert catalog.find("sql", "") is None
        one.end()
        one.end()
        await asyncio.sleep(0.1)
        assert (library / card.digest / "adapter_model.safetensors").exists()
        two.end()
        await until(lambda: not (library / card.digest).exists())
        # and they can come back
        again = await catalog.change(lambda registry: install(registry, tmp_path, "sql", 1))
        assert again.digest == card.digest and (library / card.digest).exists()

    run(tmp_path, test)


def test_what_is_installed_again_is_not_taken_away(tmp_path: Path) -> None:
    async def test(catalog: AdapterCatalog) -> None:
        card = await catalog.change(lambda registry: install(registry, tmp_path, "sql", 1))
        lease = catalog.hold([choice(card)])
        await catalog.change(lambda registry: registry.remove("sql", keep=[card.digest]))
        await catalog.change(lambda registry: install(registry, tmp_path, "renamed", 1))
        lease.end()
        await asyncio.sleep(0.2)
        assert (tmp_path / "experts" / "library" / card.digest).exists()

    run(tmp_path, test)


def test_nothing_that_is_removed_while_others_go_stays(tmp_path: Path) -> None:
    async def test(catalog: AdapterCatalog) -> None:
        library = tmp_path / "experts" / "library"
        cards = [
            await catalog.change(partial(install, folder=tmp_path, name=f"e{i}", seed=i))
            for i in range(5)
        ]
        for card in cards:
            # the next one goes shortly before the files of the one before do
            await catalog.change(partial(remove, card=card))
            await asyncio.sleep(0.4 * SETTLE_S)
        await until(lambda: not list(library.iterdir()), 3.0)

    run(tmp_path, test)


def test_only_removed_files_go(tmp_path: Path) -> None:
    """A directory that another process imported for itself is not ours to free."""

    async def test(catalog: AdapterCatalog) -> None:
        mine = await catalog.change(lambda registry: install(registry, tmp_path, "sql", 1))
        source = lora_directory(tmp_path / "imported", 7)
        other = await catalog.ask(lambda registry: registry.import_directory(source))
        await catalog.change(lambda registry: registry.remove("sql", keep=[mine.digest]))
        library = tmp_path / "experts" / "library"
        await until(lambda: not (library / mine.digest).exists())
        assert (library / other.digest).exists()

    run(tmp_path, test)


def test_what_another_server_removed_is_not_ours_to_free(tmp_path: Path) -> None:
    """Two servers on one home: the one that removes knows its own requests, and nobody else's."""

    async def test(catalog: AdapterCatalog) -> None:
        other = AdapterCatalog(tmp_path / "experts")
        await other.start()
        card = await other.change(lambda registry: install(registry, tmp_path, "sql", 1))
        await until(lambda: catalog.find("sql", "") is not None)
        lease = other.hold([choice(card)])
        await other.change(lambda registry: registry.remove("sql", keep=[card.digest]))
        await until(lambda: catalog.find("sql", "") is None)
        files = tmp_path / "experts" / "library" / card.digest
        await asyncio.sleep(3 * SETTLE_S)
        assert files.exists()
        lease.end()
        await until(lambda: not files.exists())
        await other.close()

    run(tmp_path, test)


def test_a_lease_that_is_dropped_ends(tmp_path: Path) -> None:
    async def test(catalog: AdapterCatalog) -> None:
        card = await catalog.change(lambda registry: install(registry, tmp_path, "sql", 1))
        lease = catalog.hold([choice(card)])
        assert catalog.leases.waiting == {"sql": 1} and catalog.leases.digests_in_use() == {
            card.digest
        }
        lease.start()
        lease.start()
        assert catalog.leases.running == {"sql": 1} and not catalog.leases.waiting
        del lease
        gc.collect()
        assert not catalog.leases.digests_in_use() and not catalog.leases.running

    run(tmp_path, test)


def test_a_server_without_adapters_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        catalog = AdapterCatalog(None)
        await catalog.start()
        assert catalog.find("sql", "") is None
        with pytest.raises(UnsupportedFeature, match="device_bytes is 0"):
            await catalog.ask(lambda registry: registry.cards())
        await catalog.close()
        # a registry that cannot be opened keeps nobody from serving the base
        (tmp_path / "experts").write_text("a file where a folder should be")
        broken = AdapterCatalog(tmp_path / "experts")
        await broken.start()
        with pytest.raises(Unavailable, match="cannot be opened"):
            await broken.ask(lambda registry: registry.cards())
        await broken.close()

    asyncio.run(main())


def test_a_damaged_row_costs_the_experts_and_not_the_server(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "experts")
    install(registry, tmp_path, "sql", 1)
    database = sqlite3.connect(tmp_path / "experts" / "registry.db", isolation_level=None)

    async def late(catalog: AdapterCatalog) -> None:
        database.execute("UPDATE versions SET bases = '['")
        database.execute("UPDATE counter SET generation = generation + 1")
        await asyncio.sleep(1.5 * POLL_S)
        # what is known stays, and what is mended shows
        assert catalog.find("sql", "") is not None
        database.execute("UPDATE versions SET bases = '[]', name = 'mended'")
        database.execute("UPDATE meanings SET alias = 'mended', name = 'mended'")
        await until(lambda: catalog.find("mended", "") is not None)
        database.execute("UPDATE versions SET bases = '['")

    async def early(catalog: AdapterCatalog) -> None:
        assert not list(catalog.names())
        with pytest.raises(Unavailable, match="cannot be opened"):
            await catalog.ask(lambda registry: 0)

    run(tmp_path, late)
    run(tmp_path, early)
    database.close()
