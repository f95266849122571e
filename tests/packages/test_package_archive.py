"""Packing and unpacking: the same bytes each time, every file back as it was."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from coterie.core.errors import ConfigError, WeightsError
from coterie.packages import archive
from coterie.packages.archive import inspect, pack, repack, unpack
from coterie.packages.directory import collect, open_directory
from coterie.packages.manifest import from_document
from coterie.packages.paths import adapter_digest, digest_of, file_sha256
from coterie.packages.tar_stream import LIMITS
from tests.helpers.adapters import hostile_archives
from tests.helpers.adapters.package_files import document, lora_directory, package, safetensors


def full_directory(path: Path) -> Path:
    lora_directory(path)
    (path / "tests").mkdir()
    (path / "tests" / "held_out.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (path / "soft_prompts").mkdir()
    (path / "soft_prompts" / "p.safetensors").write_bytes(safetensors({"p": ([2], bytes(8))}))
    (path / "grammar.gbnf").write_text('root ::= "a"\n')
    (path / "LICENSE").write_text("Apache-2.0\n")
    (path / "training_args.bin").write_bytes(b"\x80\x04.")
    (path / "optimizer.pt").write_bytes(b"PK\x03\x04")
    return path


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    directory = full_directory(tmp_path / "peft")
    collected = collect(directory)
    assert collected.left_out == ("optimizer.pt", "training_args.bin")
    out = tmp_path / "sql.expert"
    made = pack(collected.files, from_document(document()), out)
    package = inspect(out)
    assert package.files == made.files
    assert package.digest == digest_of(directory)
    into = tmp_path / "into"
    into.mkdir()
    unpack(package, into)
    found = contents(into)
    del found["manifest.json"]
    for name in collected.left_out:
        (directory / name).unlink()
    assert found == contents(directory)
    assert all(stat_mode(p) == 0 for p in into.rglob("*") if p.is_file())


def stat_mode(path: Path) -> int:
    """Whether anything in it can be executed."""
    return path.stat().st_mode & 0o111


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for turn in ("one", "two"):
        directory = full_directory(tmp_path / turn / "peft")
        for number, path in enumerate(sorted(directory.rglob("*"))):
            os.utime(path, (1000 + number, 2000 + number))
            path.chmod(0o755 if turn == "one" else 0o700)
        out = tmp_path / turn / "a.expert"
        pack(collect(directory).files, from_document(document()), out)
        made.append(out.read_bytes())
    assert made[0] == made[1]
    assert made[0][4:8] == bytes(4) and made[0][9] == 0xFF  # no time, no system


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    """Stored and compressed blocks in one stream are plain gzip to everyone."""
    directory = lora_directory(tmp_path / "large", floats=100_000)
    weights = (directory / "adapter_model.safetensors").read_bytes()
    large = tmp_path / "large.expert"
    pack(collect(directory).files, from_document(document()), large)
    with tarfile.open(large) as tar:
        found = tar.extractfile("adapter_model.safetensors")
        assert found is not None and found.read() == weights
    made = package(tmp_path)
    assert isinstance(made.source, Path)
    with tarfile.open(made.source) as tar:
        infos = tar.getmembers()
    assert [info.name for info in infos] == sorted(made.files)
    assert all(info.isreg() and info.mtime == info.uid == info.gid == 0 for info in infos)


def test_other_tools_can_write_it(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name, data in hostile_archives.good_entries():
            info = tarfile.TarInfo(name.decode())
            info.size, info.mtime = len(data), 1_700_000_000
            tar.addfile(info, io.BytesIO(data))
    assert inspect(raw.getvalue()).manifest.name == "sql"


def test_a_large_package_is_unpacked_in_a_second_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_KEEP_BYTES", 100)
    source = package(tmp_path).source
    assert isinstance(source, Path)
    found = inspect(source)
    assert "adapter_model.safetensors" not in found.contents
    into = tmp_path / "into"
    into.mkdir()
    unpack(found, into)
    assert digest_of(into) == found.digest
    again = repack(found, found.manifest, tmp_path / "again.expert")
    assert (tmp_path / "again.expert").read_bytes() == source.read_bytes()
    assert again.digest == found.digest


def test_a_package_that_changes_between_the_passes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_KEEP_BYTES", 100)
    source = package(tmp_path, seed=1).source
    other = package(tmp_path, seed=2).source
    assert isinstance(source, Path) and isinstance(other, Path)
    found = inspect(source)
    source.write_bytes(other.read_bytes())
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(WeightsError, match="changed while it was read"):
        unpack(found, into)


def test_packing_what_no_package_may_hold_leaves_no_file(tmp_path: Path) -> None:
    directory = lora_directory(tmp_path / "peft")
    (directory / "README.md").write_bytes(b"\xff\xfe")
    out = tmp_path / "out" / "a.expert"
    out.parent.mkdir()
    with pytest.raises(WeightsError, match=r"README\.md: refused, it is not UTF-8"):
        pack(collect(directory).files, from_document(document()), out)
    assert list(out.parent.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be written"):
        pack(collect(directory).files, from_document(document()), tmp_path / "no" / "a.expert")


def test_directories_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    directory = lora_directory(tmp_path / "peft")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(WeightsError, match="as a pickle"):
        open_directory(directory)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(WeightsError, match=r"no adapter_model\.safetensors"):
        open_directory(directory)
    with pytest.raises(WeightsError, match="no such directory"):
        open_directory(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="no such file"):
        inspect(tmp_path / "nowhere.expert")


def test_a_directory_takes_no_other_files_along(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of this machine alone")
    directory = lora_directory(tmp_path / "peft")
    (directory / "README.md").unlink()
    (directory / "README.md").symlink_to(secret)
    with pytest.raises(WeightsError, match="outside"):
        collect(directory)
    (directory / "README.md").unlink()
    (directory / "NOTICE").write_text("mine")
    (directory / "LICENSE").symlink_to("NOTICE")
    assert "LICENSE" in collect(directory).files
    # as the Hugging Face cache has them
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (blobs / name[:12]).write_bytes((directory / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{name[:12]}")
    assert open_directory(snapshot).digest == digest_of(directory)


def test_a_directory_has_an_archives_limits(tmp_path: Path) -> None:
    directory = lora_directory(tmp_path / "peft")
    (directory / "tests").mkdir()
    for number in range(LIMITS.entries):
        (directory / "tests" / f"{number}.txt").touch()
    with pytest.raises(WeightsError, match="more texts than an expert has"):
        open_directory(directory)


def test_a_directory_is_a_package_with_a_made_up_manifest(tmp_path: Path) -> None:
    directory = lora_directory(tmp_path / "My LoRA")
    found = open_directory(directory)
    assert found.manifest.name == "my-lora"
    assert found.manifest.version == f"0.0.0-{found.digest[:12]}"
    assert found.digest == digest_of(directory)


def test_the_digest_is_of_config_and_weights_alone(tmp_path: Path) -> None:
    one, two = package(tmp_path, seed=1), package(tmp_path, name="other", seed=1)
    assert one.digest == two.digest
    assert one.digest != package(tmp_path, seed=3).digest
    assert adapter_digest("a", "b") != adapter_digest("b", "a")
    directory = lora_directory(tmp_path / "x", seed=1)
    config = file_sha256(directory / "adapter_config.json")
    weights = file_sha256(directory / "adapter_model.safetensors")
    assert one.digest == adapter_digest(config, weights)


def test_the_crc_is_checked(tmp_path: Path) -> None:
    data = hostile_archives.good()
    assert gzip.decompress(data)
    with pytest.raises(WeightsError, match="damaged"):
        inspect(data[:-8] + bytes(4) + data[-4:])


@pytest.mark.parametrize("text", ["a.b is a name", "N. one", "t.\n", "", "collection\nof things\n"])
def test_texts_that_begin_like_a_pickle_are_texts(text: str) -> None:
    found = inspect(hostile_archives.plus(b"README.md", text.encode()))
    assert found.read_text("README.md") == text


def test_a_pickle_with_words_behind_it_is_a_pickle() -> None:
    with pytest.raises(WeightsError, match="a pickle"):
        inspect(hostile_archives.plus(b"README.md", b"cos\nsystem\n(S'true'\ntR.and words"))
