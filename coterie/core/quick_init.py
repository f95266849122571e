"""Frozen dataclasses that are made in less time.

The `__init__` of a frozen dataclass calls `object.__setattr__` for each field, which was a tenth of
the gateway's time per request. Here the new object is of a second class with the same slots, but
not frozen, while its fields are set.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def quick_init(cls: type[T]) -> type[T]:
    """For `@dataclass(frozen=True, slots=True)`, written above it. The class stays as it is, apart
    from the speed of its `__init__`."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    own = cls.__dict__.get("__slots__")
    if own is None or cls.__bases__ != (object,) or any(f.kw_only or not f.init for f in fields):
        raise TypeError(f"{cls.__name__} must have slots, no base, and only positional fields")
    plain_init = cls.__init__
    unfrozen = type(cls.__name__, (), {"__slots__": own, "__module__": cls.__module__})
    names: dict[str, Any] = {"_frozen": cls, "_unfrozen": unfrozen, "_set": object.__setattr__}
    parameters, lines = ["self"], ['_set(self, "__class__", _unfrozen)']
    for field in fields:
        default, value = f"_default_{field.name}", field.name
        if field.default_factory is not dataclasses.MISSING:
            names[default], names[f"_make_{field.name}"] = _MADE, field.default_factory
            value = f"_make_{field.name}() if {field.name} is {default} else {field.name}"
        else:
            names[default] = field.default
        required = names[default] is dataclasses.MISSING
        parameters.append(field.name if required else f"{field.name}={default}")
        lines.append(f"self.{field.name} = {value}")
    lines.append("self.__class__ = _frozen")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    source = f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines)
    exec(source, names)
    made = names["__init__"]
    made.__qualname__, made.__annotations__ = plain_init.__qualname__, plain_init.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]
    return cls


# stands for a default that is made anew for each object
_MADE: Any = dataclasses.field
