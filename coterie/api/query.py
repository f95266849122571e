"""Parameters behind the `?` of a path, checked like a body: unknown and repeated names refused."""

from __future__ import annotations

import difflib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from coterie.api.body import check
from coterie.core.errors import InvalidRequest

MAX_NAME_SHOWN = 64


class QueryParameters(BaseModel):
    """Base of every set of parameters; numbers are read from their text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Parameters = TypeVar("Parameters", bound=QueryParameters)


def query_of(request: Request, model: type[Parameters]) -> Parameters:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in model.model_fields:
            if model.model_config.get("extra") == "ignore":
                continue
            near = difflib.get_close_matches(name[:MAX_NAME_SHOWN], model.model_fields, 1, 0.0)[0]
            raise InvalidRequest(
                f"unknown parameter `{name[:MAX_NAME_SHOWN]}`; did you mean `{near}`?",
                param=name[:MAX_NAME_SHOWN],
            )
        if name in given:
            raise InvalidRequest(f"{name}: is given twice", param=name)
        given[name] = value
    return check(model, given)
