"""Manifests of both schemas, and what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import CoterieError, InvalidRequest, WeightsError
from coterie.packages.manifest import (
    BaseModelRef,
    check_name,
    check_version,
    name_from,
    read,
    version_order,
    write,
)
from coterie.packages.strict_json import canonical, parse
from tests.helpers.adapters.package_files import FINGERPRINT, document


def test_schema_2() -> None:
    more: dict[str, Any] = {
        "evaluation": {"metric": "exact", "items": 100},
        "capabilities": ["task:sql"],
    }
    found = read(json.dumps(document(description="Writes SQL", unknown=[1], **more)).encode())
    assert (found.name, found.version, found.description) == ("sql", "1.0.0", "Writes SQL")
    assert found.base_models == (BaseModelRef("tiny", FINGERPRINT),)
    assert found.fingerprints == (FINGERPRINT,)
    assert found.section("evaluation")["items"] == 100
    assert found.capabilities == ("task:sql",)
    assert found.document["unknown"] == [1]
    assert read(write(found)) == found


def test_schema_1() -> None:
    old = {
        "schema_version": "1.0",
        "name": "sql",
        "version": "0.2",
        "base_model": {"name": "Qwen3-0.6B", "sha256": "x"},
        "adapters": [{"type": "lora", "path": "adapter_model.safetensors", "r": 16}],
        "integrity": {"files": [{"path": "manifest.json", "sha256": "0" * 64}]},
    }
    found = read(json.dumps(old).encode())
    assert found.base_models == (BaseModelRef("Qwen3-0.6B"),)
    assert found.fingerprints == ()
    # a digest of itself says nothing
    assert found.stated_files() == {}


@pytest.mark.parametrize("name", ["sql", "a", "sql-2.1_x", "0", "a" * 64])
def test_names(name: str) -> None:
    assert check_name(name) == name
    assert name_from(name) == name.strip("-._")


@pytest.mark.parametrize(
    "name", ["", "A", "a b", "a:b", "a@1", "a+b", "a=1", "-a", ".a", "a" * 65, "a/b", "a\n", None]
)
def test_names_that_are_refused(name: str | None) -> None:
    with pytest.raises(InvalidRequest):
        check_name(name)


@pytest.mark.parametrize("version", ["", "v1", "1.2.3.4", "1+2", "1..2", "1.0\n", "1@2", "٣"])
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(InvalidRequest):
        check_version(version)


def test_versions_sort_as_semantic_versions_do() -> None:
    order = ["0.0.0-abc", "1.0.0-alpha", "1.0.0-alpha.2", "1.0.0-alpha.10", "1.0.0", "1.2", "1.10"]
    shuffled = [order[i] for i in (3, 0, 6, 5, 1, 4, 2)]
    assert sorted(shuffled, key=version_order) == order


def test_canonical_json_is_of_the_meaning() -> None:
    one = parse(b'{"b": 1, "a": "\\u00e9"}', "x")
    two = parse('{ "a":"é",\n"b":1 }'.encode(), "x")
    assert canonical(one) == canonical(two) == b'{"a":"\\u00e9","b":1}'


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=8,
    )
)
def test_any_json_is_read_or_refused(value: object) -> None:
    data = json.dumps(value).encode()
    try:
        found = parse(data, "x")
    except WeightsError:
        return
    assert found == value and parse(canonical(found), "x") == found


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(CoterieError):
        read(data)
