"""service/adapters/matching.py and the catalog: matchers are built aside and swapped whole."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import InternalError
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from coterie.routing.router import Router, Specialist
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.adapters.matching import MatcherBuilder
from tests.helpers.adapters.package_files import FINGERPRINT, package
from tests.helpers.adapters.profiles import Answers, asking, profile


class Workshop:
    """Builds when it is let, and says on which thread."""

    def __init__(self) -> None:
        self.let, self.begun = threading.Event(), threading.Event()
        self.built: list[tuple[str, ...]] = []
        self.threads: set[tuple[str, bool]] = set()
        self.fail = False

    def build(self, profiles: Sequence[AdapterProfile]) -> Answers:
        self.begun.set()
        assert self.let.wait(10)
        thread = threading.current_thread()
        self.threads.add((thread.name, thread.daemon))
        self.built.append(tuple(p.card.name for p in profiles))
        if self.fail:
            raise RuntimeError("no")
        return Answers([], threshold=len(self.built) / 100)


def test_the_last_catalog_wins_and_nobody_waits() -> None:
    shop = Workshop()

    async def main() -> None:
        matching = MatcherBuilder(shop.build)
        assert matching.matcher is None
        begun = time.perf_counter()
        matching.update_profiles([profile("a")])
        await asyncio.to_thread(shop.begun.wait, 10)
        # while the first is being built, others come and go; requests still see none
        for names in ("ab", "abc", "abcd"):
            matching.update_profiles([profile(name) for name in names])
        assert matching.matcher is None and time.perf_counter() - begun < 5
        shop.let.set()
        await matching.settled()
        # the first, then the last; those between were never wanted
        assert shop.built == [("a",), ("a", "b", "c", "d")]
        first = matching.matcher
        assert first is not None and first.threshold == 0.02
        matching.update_profiles([profile(name) for name in "abcd"])
        await matching.settled()
        assert matching.matcher is first and len(shop.built) == 2
        # a build that fails leaves the one before
        shop.fail = True
        matching.update_profiles([profile("z")])
        with pytest.raises(InternalError, match="cannot be built"):
            await matching.settled()
        assert matching.matcher is first and shop.built[-1] == ("z",)
        matching.update_profiles([])
        assert matching.matcher is None
        await matching.close()

    asyncio.run(main())
    # a process that ends does not wait for it
    assert shop.threads == {("matcher", True)}


def test_a_catalog_that_came_while_a_build_failed_gets_its_own() -> None:
    shop = Workshop()
    shop.fail = True

    async def main() -> None:
        matching = MatcherBuilder(shop.build)
        matching.update_profiles([profile("broken")])
        await asyncio.to_thread(shop.begun.wait, 10)
        matching.update_profiles([profile("a")])
        shop.let.set()
        while not shop.built:
            await asyncio.sleep(0)
        shop.fail = False
        await matching.settled()
        assert shop.built == [("broken",), ("a",)]
        assert matching.matcher is not None and matching.matcher.threshold == 0.02
        await matching.close()

    asyncio.run(main())


def test_closing_while_one_is_being_built() -> None:
    shop = Workshop()

    async def main() -> None:
        matching = MatcherBuilder(shop.build)
        matching.update_profiles([profile("a")])
        await asyncio.to_thread(shop.begun.wait, 10)
        await matching.close()
        shop.let.set()
        assert matching.matcher is None

    asyncio.run(main())


def install(
    registry: AdapterRegistry,
    folder: Path,
    name: str,
    seed: int,
    now: bool = False,
    **sections: Any,
) -> AdapterCard:
    made = package(folder, name=name, seed=seed, version=f"{seed}.0.0", **sections)
    assert isinstance(made.source, Path)
    return registry.install(
        made.source, trust=TrustStore(folder / "trust.json"), allow_unsigned=True, now=now
    )


SQL = {"keywords": ["sql", "query"], "examples": ["Write SQL: how many users are there?"]}
SLUG = {"keywords": ["slug"], "examples": ["Make a URL slug: Hello World"]}


def test_from_package_to_plan(tmp_path: Path) -> None:
    """Installed, matched, replaced, damaged and removed, as requests see it."""
    registry = AdapterRegistry(tmp_path / "experts")
    install(registry, tmp_path, "sql", 1, routing=SQL, constraints={"requires": ["slug"]})
    install(registry, tmp_path, "slug", 2, routing=SLUG, evaluation={"expert": {"score": 0.8}})
    registry.alias("db", "sql")

    async def main() -> None:
        catalog = AdapterCatalog(registry.root)
        await catalog.start()
        router = Router([Specialist("tiny", fingerprint=FINGERPRINT)], catalog)

        def chosen(text: str) -> list[str]:
            return [item.name for item in router.plan(asking(text)).adapters]

        try:
            await catalog.settled()
            # an alias is another name, not another expert
            assert list(catalog.current_profiles()) == ["slug", "sql"]
            assert catalog.usual_quality() == pytest.approx(0.8)
            assert chosen("Make a URL slug: Hello World") == ["slug@2.0.0"]
            assert set(chosen("Write SQL: how many users are there?")) == {
                "sql@1.0.0",
                "slug@2.0.0",
            }
            before = catalog.current_profiles()["sql"]
            # nothing is routed to a staged version
            await catalog.change(lambda r: install(r, tmp_path, "slug", 3, routing=SLUG))
            await catalog.settled()
            assert chosen("Make a URL slug: Hello World") == ["slug@2.0.0"]
            await catalog.change(lambda r: install(r, tmp_path, "slug", 3, True, routing=SLUG))
            # at once, though the matcher is older than the new version
            assert chosen("Make a URL slug: Hello World") == ["slug@3.0.0"]
            assert catalog.current_profiles()["sql"] is before
            old = catalog.find("slug", "2.0.0")
            assert old is not None and catalog.profile(old).quality == 0.8
            await catalog.change(lambda r: r.remove("slug"))
            plan = router.plan(asking("Write SQL: how many users are there?"))
            assert plan.adapters == () and plan.trace is not None
            whys = {item.name: item.why for item in plan.trace.candidates}
            assert "requires slug" in whys["sql@1.0.0"] and "slug@3.0.0" not in whys
        finally:
            await catalog.close()

    asyncio.run(main())


def test_a_damaged_manifest_takes_nothing_with_it(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "experts")
    broken = install(registry, tmp_path, "sql", 1, routing=SQL)
    install(registry, tmp_path, "slug", 2, routing=SLUG)
    (registry.files(broken) / "manifest.json").write_bytes(b"\xff{")

    async def main() -> None:
        catalog = AdapterCatalog(registry.root)
        await catalog.start()
        try:
            assert catalog.profile(broken) == AdapterProfile(broken)
            assert catalog.current_profiles()["slug"].keywords == ("slug",)
            assert catalog.find("sql", "") == broken
        finally:
            await catalog.close()

    asyncio.run(main())
