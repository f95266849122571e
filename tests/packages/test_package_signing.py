"""Signatures and trust: what is accepted, from whom, until when."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from coterie.core.errors import ConfigError, Forbidden, NotFound, WeightsError
from coterie.packages import signing, trust
from coterie.packages.archive import inspect, repack
from coterie.packages.manifest import Manifest
from coterie.packages.trust import TrustStore
from tests.helpers.adapters.package_files import package, signed_file


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "my.key"
    signing.new_key(path)
    return path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrustStore:
    monkeypatch.setattr(trust, "PUBLISHER", tmp_path / "no-publisher.json")
    return TrustStore(tmp_path / "state" / "trust.json")


def public(key: Path) -> bytes:
    return signing.public_of(signing.read_key(key))


def test_a_key_is_32_bytes_for_its_owner_alone(key: Path) -> None:
    assert key.stat().st_size == 32
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="never overwritten"):
        signing.new_key(key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        signing.read_key(key)
    key.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="no private key"):
        signing.read_key(key)
    with pytest.raises(ConfigError, match="cannot be read"):
        signing.read_key(key.with_name("nowhere"))


def test_every_state_of_a_signature(tmp_path: Path, key: Path, store: TrustStore) -> None:
    unsigned = package(tmp_path, name="plain")
    assert store.verify(unsigned).state == "unsigned"
    found = inspect(signed_file(tmp_path, key))
    assert store.verify(found).state == "untrusted"
    expires_at = time.time() + 100
    known = store.trust(public(key), "the team", expires_at)
    verdict = store.verify(found)
    assert (verdict.state, verdict.key_id, verdict.comment) == ("trusted", known.id, "the team")
    assert store.verify(found, now=expires_at + 1).state == "expired"
    store.revoke(known.id)
    assert store.verify(found).state == "revoked"


def test_what_may_be_used(tmp_path: Path, key: Path, store: TrustStore) -> None:
    found = inspect(signed_file(tmp_path, key))
    with pytest.raises(Forbidden, match="unknown key"):
        store.verify(found).require("x", allow_unsigned=False)
    store.verify(found).require("x", allow_unsigned=True)
    store.trust(public(key))
    store.verify(found).require("x", allow_unsigned=False)
    store.revoke(signing.key_id(public(key))[:6])
    # what the operator allows does not bring a revoked key back
    with pytest.raises(Forbidden, match="is revoked"):
        store.verify(found).require("x", allow_unsigned=True)
    with pytest.raises(Forbidden, match="was revoked"):
        store.trust(public(key))


def _resealed(path: Path, **changes: object) -> Path:
    """The package with another manifest, its own digests kept right."""
    found = inspect(path)
    integrity = {**found.manifest.integrity, **changes.pop("integrity", {})}  # type: ignore[dict-item]
    document = {**found.manifest.document, **changes, "integrity": integrity}
    manifest = Manifest(found.manifest.name, found.manifest.version, (), document)
    repack(found, manifest, path)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"description": "changed"},
        {"version": "9.9.9"},
        {"base_models": []},
        {"added": 1},
        {"integrity": {"publisher": "someone else"}},
        {"integrity": {"signature": "00" * 64}},
        {"integrity": {"signature": "zz"}},
        {"integrity": {"signature_algorithm": "none"}},
        {"integrity": {"pubkey": "00" * 32}},
        {"integrity": {"key_id": "0" * 16}},
        {"integrity": {"pubkey": 5}},
    ],
)
def test_any_change_breaks_the_signature(
    tmp_path: Path, key: Path, store: TrustStore, changes: dict[str, object]
) -> None:
    store.trust(public(key))
    path = signed_file(tmp_path, key)
    assert store.verify(inspect(path)).trusted
    verdict = store.verify(inspect(_resealed(path, **changes)))
    assert verdict.state == "broken"
    with pytest.raises(Forbidden):
        verdict.require("x", allow_unsigned=True)


def test_a_signature_does_not_fit_another_package(
    tmp_path: Path, key: Path, store: TrustStore
) -> None:
    """Same manifest and signature, other weights whose digests the manifest does not state."""
    store.trust(public(key))
    one = package(tmp_path, seed=1)
    two = package(tmp_path, seed=2)
    stolen = signing.signed(one, signing.read_key(key))
    integrity = {k: v for k, v in stolen.integrity.items() if k != "files"}
    assert isinstance(two.source, Path)
    swapped = repack(two, stolen.with_section("integrity", integrity), two.source)
    assert store.verify(swapped).state == "broken"


def test_signing_again_replaces_the_signature(tmp_path: Path, key: Path, store: TrustStore) -> None:
    other = tmp_path / "other.key"
    signing.new_key(other)
    path = signed_file(tmp_path, other)
    found = inspect(path)
    repack(found, signing.signed(found, signing.read_key(key)), path)
    store.trust(public(key))
    assert store.verify(inspect(path)).trusted
    first = path.read_bytes()
    repack(inspect(path), signing.signed(inspect(path), signing.read_key(key)), path)
    assert path.read_bytes() == first


def test_the_built_in_key_can_be_revoked(
    tmp_path: Path, key: Path, store: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "publisher.json"
    shipped.write_text(json.dumps({"keys": [{"public_key": public(key).hex(), "comment": "us"}]}))
    monkeypatch.setattr(trust, "PUBLISHER", shipped)
    found = inspect(signed_file(tmp_path, key))
    assert store.verify(found).trusted and not store.path.exists()
    assert store.keys()[0].built_in
    store.revoke(signing.key_id(public(key)))
    assert TrustStore(store.path).verify(found).state == "revoked"


def test_a_comment_that_could_not_be_read_back_is_refused(store: TrustStore, key: Path) -> None:
    with pytest.raises(WeightsError, match="control characters"):
        store.trust(public(key), "\x1b[2J")
    assert store.keys() == []


def test_keys_are_found_by_their_start_and_only_one(store: TrustStore, key: Path) -> None:
    store.trust(public(key))
    for text in ("", "zzzz"):
        with pytest.raises(NotFound):
            store.revoke(text)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"keys": [1]}', '{"keys": [{"public_key": "aa"}]}', '{"keys": [{}]}',
             '{"keys": 5}', '{"keys": [{"public_key": 7}]}']
)  # fmt: skip
def test_a_damaged_store_trusts_nobody(store: TrustStore, text: str) -> None:
    store.path.parent.mkdir()
    store.path.write_text(text)
    with pytest.raises(WeightsError):
        store.keys()


def _trust_many(path: Path, first: int) -> None:
    for number in range(first, first + 10):
        TrustStore(path).trust(bytes([number]) * 32)


def test_two_processes_change_it_at_once(store: TrustStore) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_trust_many, args=(store.path, n)) for n in (0, 100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(store.keys()) == 20
    assert not os.path.exists(f"{store.path}.part")
