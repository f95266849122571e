"""Links, pipes and devices in adapter folders: refused or not opened, and never waited for."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.adapters.files import AdapterLibrary
from coterie.core.errors import WeightsError
from coterie.packages import directory as directory_module
from coterie.packages.directory import collect
from coterie.packages.paths import CONFIG, WEIGHTS, chunks_of, digest_of, open_regular
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from tests.helpers.adapters.package_files import lora_directory


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    return AdapterRegistry(tmp_path / "state" / "experts")


def within(seconds: float, work: Callable[[], object]) -> None:
    """A call that waits for a pipe cannot be interrupted: it runs in a thread."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    if failed:
        raise failed[0]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "loop", "huge"])
def test_other_files_of_a_folder_are_never_opened(
    kind: str, tmp_path: Path, registry: AdapterRegistry
) -> None:
    """No adapter needs them, whatever they are called."""
    folder = lora_directory(tmp_path / "peft")
    (folder / "tests").mkdir()
    for name in ("a.safetensors", "tests/a.safetensors", "soft_prompts.safetensors"):
        if kind == "pipe":
            os.mkfifo(folder / name)
        elif kind == "huge":
            with (folder / name).open("wb") as file:
                file.truncate(1 << 40)
        else:
            (folder / name).symlink_to(name.rpartition("/")[2] if kind == "loop" else kind)
    trust = TrustStore(tmp_path / "trust.json")
    within(20, lambda: registry.install(folder, trust=trust, allow_unsigned=True))
    assert registry.cards()[0].digest == digest_of(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "loop", "outside", "folder", "nowhere"])
def test_links_in_the_place_of_an_adapters_file_are_refused(
    kind: str, name: str, tmp_path: Path, registry: AdapterRegistry
) -> None:
    folder, trust = lora_directory(tmp_path / "peft"), TrustStore(tmp_path / "trust.json")
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        targets = {"loop": name, "outside": str(outside), "nowhere": "x"}
        (folder / name).symlink_to(targets.get(kind, kind))
    with pytest.raises(WeightsError, match=name):
        within(20, lambda: registry.install(folder, trust=trust, allow_unsigned=True))
    assert registry.cards() == []


@pytest.mark.parametrize("kind", ["file", "parent", "pipe"])
def test_a_file_that_is_replaced_after_its_check_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of its name and its opening."""
    folder, secret = lora_directory(tmp_path / "peft"), tmp_path / "secret"
    (folder / "tests").mkdir()
    (folder / "tests" / "a.json").write_text("{}")
    secret.mkdir()
    (secret / "a.json").write_text("of this machine alone")

    def collected(directory: Path) -> directory_module.CollectedFiles:
        found = collect(directory)
        path = folder / "tests" / "a.json"
        path.unlink()
        if kind == "file":
            path.symlink_to(secret / "a.json")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.parent.rmdir()
            path.parent.symlink_to(secret)
        return found

    monkeypatch.setattr(directory_module, "collect", collected)
    with pytest.raises(WeightsError, match=r"a\.json"):
        within(20, lambda: directory_module.open_directory(folder))


def test_a_file_that_changes_its_size_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for before, after in ((b"12", b"123"), (b"12", b"1" * (3 << 20)), (b"12", b"1")):
        path.write_bytes(before)
        with open_regular(path) as file:
            path.write_bytes(after)
            with pytest.raises(WeightsError, match="changed"):
                list(chunks_of(file, len(before), "a.json"))


def test_links_in_the_registrys_folders_are_not_followed(
    tmp_path: Path, registry: AdapterRegistry
) -> None:
    folder, trust = lora_directory(tmp_path / "peft"), TrustStore(tmp_path / "trust.json")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("of somebody else")
    card = registry.install(folder, trust=trust, allow_unsigned=True)
    places = (registry.library / card.digest, registry.files(card))
    for target in (outside, tmp_path / "nowhere"):
        for place in places:
            shutil.rmtree(place)
            place.symlink_to(target)
        assert not registry.is_sound(card.digest)
        # installing again repairs both
        registry.install(folder, trust=trust, allow_unsigned=True)
        assert registry.is_sound(card.digest)
        assert not any(place.is_symlink() for place in places)
    for name in ("outside", "nowhere"):
        link = registry.root / "staging" / name
        link.symlink_to(tmp_path / name)
        os.utime(link, (0, 0), follow_symlinks=False)
        (registry.root / "packages" / name).symlink_to(tmp_path / name)
        (registry.library / name).symlink_to(tmp_path / name)
    registry.sweep()
    registry.sweep(older_than_s=-1)
    assert [path for path in registry.root.rglob("*") if path.is_symlink()] == []
    assert (outside / "kept").exists()
    # a pipe in the library is a damaged adapter, not a wait
    weights = registry.library / card.digest / WEIGHTS
    weights.unlink()
    os.mkfifo(weights)
    assert not registry.is_sound(card.digest)
    with pytest.raises(WeightsError, match="regular"):
        within(20, lambda: AdapterLibrary(registry.library).load(card.digest))
