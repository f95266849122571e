"""What PEFT itself writes goes through a signed package unchanged, whatever its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.adapters.files import open_adapter
from coterie.packages.archive import pack, repack
from coterie.packages.directory import collect
from coterie.packages.manifest import from_document
from coterie.packages.paths import digest_of
from coterie.packages.registry import AdapterRegistry
from coterie.packages.signing import new_key, public_of, read_key, signed
from coterie.packages.trust import TrustStore
from tests.helpers.adapters.package_files import document
from tests.helpers.adapters.peft_adapters import KINDS, make_adapter
from tests.helpers.models.tiny import tiny_checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, tmp_path: Path) -> None:
    directory = make_adapter(tiny_checkpoint("llama"), kind)
    out, key = tmp_path / "x.expert", tmp_path / "key"
    public = new_key(key)
    made = pack(collect(directory).files, from_document(document(name="x")), out)
    repack(made, signed(made, read_key(key)), out)
    trust = TrustStore(tmp_path / "trust.json")
    trust.trust(public)
    assert public == public_of(read_key(key))
    registry = AdapterRegistry(tmp_path / "experts")
    card = registry.install(out, trust=trust)
    assert card.kind == kind
    assert card.digest == digest_of(directory)
    adapter = open_adapter(registry.library / card.digest, card.digest)
    assert adapter.kind == kind
    virtual = 0 if adapter.soft is None else len(adapter.soft)
    assert card.num_virtual_tokens == virtual
    assert (virtual > 0) == (kind == "soft_prompt")
    assert registry.import_directory(directory).digest == card.digest
