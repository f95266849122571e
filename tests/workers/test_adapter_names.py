"""Adapters by name, package and directory: what is meant, what is refused, and by which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.core.errors import CoterieError, Forbidden, InvalidRequest, NotFound
from coterie.packages.archive import inspect, pack, repack
from coterie.packages.manifest import from_document
from coterie.packages.paths import CONFIG, WEIGHTS, digest_of
from coterie.packages.registry import AdapterRegistry
from coterie.packages.signing import new_key, public_of, read_key, signed
from coterie.packages.trust import TrustStore
from coterie.workers.adapter_names import AdapterNames
from tests.helpers.adapters.package_files import lora_directory
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint

HERE, ELSEWHERE = "a" * 64, "b" * 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return lora_directory(tmp_path / "source")


def package(source: Path, out: Path, bases: list[str]) -> Path:
    document = {
        "name": "poet",
        "version": "1.0.0",
        "base_models": [{"name": "tiny", "fingerprint": base} for base in bases],
        "schema_version": "2.0",
    }
    files = {name: source / name for name in (CONFIG, WEIGHTS)}
    pack(files, from_document(document), out)
    return out


def sign(path: Path, folder: Path, *, trusted: bool) -> Path:
    if not (folder / "key").exists():
        new_key(folder / "key")
    private = read_key(folder / "key")
    out = path.with_name(f"signed-{path.name}")
    plain = inspect(path)
    repack(plain, signed(plain, private), out)
    if trusted:
        TrustStore(folder / "trust.json").trust(public_of(private), "me")
    return out


def names(tmp_path: Path, **options: bool) -> AdapterNames:
    return AdapterNames(tmp_path / "experts", **options)


def test_packages_must_be_signed_by_someone_trusted(tmp_path: Path, source: Path) -> None:
    plain = package(source, tmp_path / "poet.expert", [HERE])
    digest = digest_of(source)
    with pytest.raises(Forbidden, match="not signed"):
        names(tmp_path).choose([str(plain)], HERE)
    unknown = sign(plain, tmp_path, trusted=False)
    with pytest.raises(Forbidden, match="unknown key"):
        names(tmp_path).choose([str(unknown)], HERE)
    open_house = names(tmp_path, allow_unsigned=True)
    assert open_house.choose([str(plain)], HERE)[0][0].digest == digest
    signed_one = sign(plain, tmp_path, trusted=True)
    strict = names(tmp_path)
    (choice,), tokens = strict.choose(f"{signed_one}=0.25", HERE)
    assert (choice.digest, choice.weight, tokens) == (digest, 0.25, 0)
    assert (strict.library / digest / WEIGHTS).is_file()
    # used, not installed
    with pytest.raises(NotFound):
        strict.choose(["poet"], HERE)
    strict.close()
    open_house.close()


def test_a_broken_package_is_refused_whatever_is_allowed(tmp_path: Path, source: Path) -> None:
    good = sign(package(source, tmp_path / "poet.expert", [HERE]), tmp_path, trusted=True)
    other = package(lora_directory(tmp_path / "other", seed=5), tmp_path / "other.expert", [HERE])
    forged = tmp_path / "forged.expert"
    with pytest.raises(CoterieError):
        # the manifest of a signed package around other weights
        repack(inspect(other), signed(inspect(good), read_key(tmp_path / "key")), forged)
        names(tmp_path, allow_unsigned=True).choose([str(forged)], HERE)
    half = tmp_path / "half.expert"
    half.write_bytes(good.read_bytes()[:-200])
    with pytest.raises(CoterieError):
        names(tmp_path, allow_unsigned=True).choose([str(half)], HERE)
    assert not (tmp_path / "experts" / "library").exists()


def test_an_adapter_for_another_base_is_refused(tmp_path: Path, source: Path) -> None:
    foreign = sign(package(source, tmp_path / "poet.expert", [ELSEWHERE]), tmp_path, trusted=True)
    with pytest.raises(InvalidRequest, match="another base model"):
        names(tmp_path).choose([str(foreign)], HERE)
    # a PEFT directory says nothing of fingerprints: shapes decide when it is loaded
    assert names(tmp_path).choose([str(source)], HERE)[0][0].digest == digest_of(source)


def test_an_installed_name_goes_before_a_folder_beside_us(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = lora_directory(tmp_path / "poet", seed=5)
    registry = AdapterRegistry(tmp_path / "experts")
    trust = TrustStore(tmp_path / "trust.json")
    registry.install(source, trust=trust, allow_unsigned=True, name="poet", version="1.0.0")
    registry.close()
    mine = names(tmp_path)
    assert mine.find("poet").digest == mine.find("poet@1.0.0").digest == digest_of(source)
    assert mine.find("./poet").digest == digest_of(other)
    with pytest.raises(NotFound, match="no version"):
        mine.find("poet@9.9.9")
    mine.close()


def test_nothing_is_opened_before_it_is_asked_for(tmp_path: Path) -> None:
    assert names(tmp_path).choose([], HERE) == ((), 0)
    assert not (tmp_path / "experts").exists()


def test_run_says_which_experts_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_adapter(tiny_checkpoint("llama"), "lora", 1)
    model = ["run", str(tiny_checkpoint("llama")), "--dtype", "fp32", "--kv-bytes", "8MB"]
    asked = ["--prompt-ids", "1,2,3", "--max-tokens", "2", "--json", "--expert", f"{source}=0.5"]
    assert main([*model, *asked]) == 0
    (used,) = json.loads(capsys.readouterr().out)["experts"]
    assert (used["digest"], used["weight"]) == (digest_of(source), 0.5)
    plain = package(source, tmp_path / "poet.expert", [])
    assert main([*model, *asked[:-1], str(plain), "--allow-unsigned"]) == 0
    assert capsys.readouterr().err.count("not signed") == 1


def test_run_refuses_a_wrong_expert_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_checkpoint("llama"))
    common = ["run", model, "--dtype", "fp32", "--prompt", "x", "--max-tokens", "2"]
    assert main([*common, "--expert", str(tmp_path / "nobody")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "no such file" in said.err and "Traceback" not in said.err
    with pytest.raises(SystemExit, match="2"):
        main([*common, "--expert", "poet=much"])
    assert "no number" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*common, "--expert", "poet=10.5"])
    assert "from -10 to 10" in capsys.readouterr().err
