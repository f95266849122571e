"""Types of both SDKs are those of the OpenAPI document."""

from __future__ import annotations

from coterie.api.routes import reference
from scripts.generate_sdk import camel, drifted, python_type, typescript_type


def test_types_are_those_of_the_document() -> None:
    assert not drifted(reference()), "run make docs"


def test_a_changed_answer_is_drift() -> None:
    document = reference()
    del document["components"]["schemas"]["InferenceResult"]["properties"]["latency_ms"]
    assert set(drifted(document)) == {
        "sdk/python/coterie_client/types.py",
        "sdk/typescript/src/types.ts",
    }


def test_schemas_read_as_types() -> None:
    schema = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]}
    assert python_type(schema) == "list[int] | None"
    assert typescript_type(schema) == "number[] | null"
    assert typescript_type({"type": "array", "items": {"enum": ["a", "b"]}}) == '("a" | "b")[]'
    assert python_type({"type": ["string", "null"]}) == "str | None"
    assert python_type({"const": "list"}) == 'Literal["list"]'
    assert python_type({"type": "object", "additionalProperties": {"type": "number"}}) == (
        "dict[str, float]"
    )
    assert camel("vram_peak_mb") == "vramPeakMb"
