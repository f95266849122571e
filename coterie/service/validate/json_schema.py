"""json_schema: the answer is JSON that the request's schema accepts.

Runs only in a validator process: a caller's schema may have patterns that run forever. References
are resolved in the schema and the published drafts, never over a network.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

from coterie.core.errors import InvalidRequest, MissingDependency
from coterie.core.events import ValidationResult
from coterie.service.validate.base import result_of


class JsonSchemaValidator:
    name = "json_schema"

    def __init__(self, argument: str) -> None:
        """`argument` is the schema as JSON."""
        self._schema = argument

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        try:
            value = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
        except msgspec.MsgspecError as error:
            return str(error)
        except UnicodeDecodeError:
            return "it is not valid Unicode"
        return _first_fault(self._schema, value)


def load() -> tuple[Any, Any]:
    """The library and the published drafts: a slow import, done before the timing."""
    try:
        return import_module("jsonschema"), import_module("jsonschema_specifications").REGISTRY
    except ImportError as error:
        raise MissingDependency("JSON Schema is not installed: pip install jsonschema") from error


def _first_fault(schema_text: str, value: Any) -> str | None:
    library, drafts = load()
    try:
        schema = msgspec.json.decode(schema_text)
        make = library.validators.validator_for(schema, default=library.Draft202012Validator)
        fault = next(make(schema, registry=drafts).iter_errors(value), None)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        # a pattern in another dialect than Python's, a reference without a target: the caller's
        # fault, and no answer's
        raise InvalidRequest(f"the schema cannot be used: {type(error).__name__}") from error
    return None if fault is None else f"{fault.json_path}: {fault.message}"
