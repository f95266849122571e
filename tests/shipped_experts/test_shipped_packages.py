"""What comes with Coterie is small, signed by its own key, and better than its base."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.core.adapters import AdapterCard
from coterie.packages import shipped
from coterie.packages.archive import Package, inspect
from coterie.packages.evaluate import ITEMS, LANGUAGE_ITEMS, read_figures, read_languages, score
from coterie.packages.profile import profile_of
from coterie.packages.signing import package_message
from coterie.packages.trust import TrustStore
from examples.expert_data import languages
from examples.expert_data.cards import ABOUT
from examples.expert_data.overlap import runs, shared
from examples.expert_data.table import EXPERTS
from examples.judge_experts import eval_lines
from examples.pack_experts import MAX_BYTES, served

FILES = shipped.files()


def made_card(package: Package) -> AdapterCard:
    name, version = package.manifest.name, package.manifest.version
    return AdapterCard(name, version, "d" * 64, package.config.kind, (), 0, 1, 0.0)


@pytest.fixture(scope="module")
def packages() -> dict[str, Package]:
    return {path.stem: inspect(path) for path in FILES}


def test_there_are_at_least_five_of_all_four_kinds(packages: dict[str, Package]) -> None:
    assert len(packages) >= 5
    assert {package.config.kind for package in packages.values()} == {
        "lora",
        "dora",
        "ia3",
        "soft_prompt",
    }
    assert packages.keys() <= EXPERTS.keys() == ABOUT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_small_and_signed_by_the_built_in_key(
    path: Path, packages: dict[str, Package], tmp_path: Path
) -> None:
    package = packages[path.stem]
    assert path.stat().st_size < MAX_BYTES
    assert package.manifest.name == path.stem
    assert package.config.kind == EXPERTS[path.stem].shape.kind
    verdict = TrustStore(tmp_path / "trust.json").verify(package)
    assert verdict.trusted, verdict.reason


def test_a_changed_manifest_breaks_the_signature(
    packages: dict[str, Package], tmp_path: Path
) -> None:
    package = next(iter(packages.values()))
    changed = package.manifest.with_section("evaluation", {"metric": "exact"})
    other = Package(changed, package.files, package.config, package.source, package.contents)
    assert package_message(other) != package_message(package)
    assert TrustStore(tmp_path / "trust.json").verify(other).state == "broken"


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_the_lower_bound_is_above_the_base(name: str, packages: dict[str, Package]) -> None:
    manifest = packages[name].manifest
    figures = read_figures(manifest.section("evaluation"), name)
    assert figures.is_better
    assert score(figures.expert).low > score(figures.base).share
    assert len(figures.base) >= 150
    stated = manifest.section("evaluation")
    assert stated["expert"]["low_95"] > stated["base"]["score"]


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_the_items_are_those_of_the_generator(name: str, packages: dict[str, Package]) -> None:
    assert packages[name].contents[ITEMS] == eval_lines(EXPERTS[name])


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_it_serves_the_languages_that_it_was_measured_in(
    name: str, packages: dict[str, Package]
) -> None:
    manifest = packages[name].manifest
    assert packages[name].contents[LANGUAGE_ITEMS] == languages.lines(name)
    spoken = read_languages(manifest.section("evaluation"), name)
    assert tuple(spoken) == tuple(sorted(languages.LANGUAGES))
    assert all(len(figures.base) == 12 for figures in spoken.values())
    stated = {
        word.removeprefix("language:")
        for word in manifest.document["capabilities"]
        if word.startswith("language:")
    }
    assert stated == set(served(spoken))


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_its_answers_have_a_form_that_can_be_checked(
    name: str, packages: dict[str, Package]
) -> None:
    """Or no outcome would ever move its success rate."""
    package = packages[name]
    profile = profile_of(made_card(package), package.manifest)
    parsed = {"task:json_parsing", "task:code_generation"} & set(profile.capabilities)
    assert profile.response_format or profile.answer_pattern or parsed


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_it_says_what_it_is_for(name: str, packages: dict[str, Package]) -> None:
    package = packages[name]
    document = package.manifest.document
    assert {"README.md", "LICENSE"} <= package.files.keys()
    assert document["license"] == "Apache-2.0"
    assert document["limitations"] and document["capabilities"]
    assert document["routing"]["keywords"] and document["training"]["data"]
    assert len(package.manifest.fingerprints) == 1


def test_the_detector_of_shared_runs_detects() -> None:
    text = "One two three, four five six: seven EIGHT nine."
    assert set(runs(text)) & set(runs("x two three four five six seven eight nine y"))
    assert not set(runs(text)) & set(runs("two three four five six seven eight ten"))
    assert not list(runs("one two three four five six seven"))


def test_no_eight_words_are_shared_with_training() -> None:
    assert not any(shared(2000).values())


@pytest.mark.full
def test_no_eight_words_are_shared_with_all_of_training() -> None:
    assert not any(shared().values())
