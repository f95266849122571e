"""Every call of the API as a value: what is sent, and the type of its answer.

Pure; both clients send these. Uses no sockets and does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from coterie_client import types

T = TypeVar("T")
Verdict = Literal["good", "bad"]


@dataclass(frozen=True)
class Call(Generic[T]):
    method: str
    path: str
    answer: type[T]
    body: Mapping[str, Any] | None = None
    # the bytes of a file, instead of `body`
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    # needs an admin key of the server
    admin: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether doing it twice has the same effect as doing it once."""
        return self.method == "GET"


def infer(
    prompt: str, options: Mapping[str, Any], *, stream: bool = False
) -> Call[types.InferenceResult]:
    body = {"prompt": prompt, **options} | ({"stream": True} if stream else {})
    return Call("POST", "/v1/infer", types.InferenceResult, body)


def submit(prompt: str, options: Mapping[str, Any]) -> Call[types.JobSubmission]:
    body = {"prompt": prompt, **options}
    headers = {"prefer": "respond-async"}
    return Call("POST", "/v1/infer", types.JobSubmission, body, headers=headers)


def job(job_id: str) -> Call[types.JobView]:
    return Call("GET", _path("/v1/jobs", job_id), types.JobView)


def jobs(after: str | None, limit: int, **filters: str | None) -> Call[types.JobList]:
    return Call("GET", "/v1/jobs", types.JobList, params=_given(filters, after, limit))


def cancel(job_id: str) -> Call[types.DeletedJob]:
    return Call("DELETE", _path("/v1/jobs", job_id), types.DeletedJob)


def job_events(job_id: str) -> Call[types.InferenceResult]:
    return Call("GET", _path("/v1/jobs", job_id) + "/events", types.InferenceResult)


def feedback(job_id: str, verdict: Verdict, comment: str | None) -> Call[types.FeedbackAnswer]:
    body: dict[str, Any] = {"job_id": job_id, "verdict": verdict}
    body |= {} if comment is None else {"comment": comment}
    return Call("POST", "/v1/feedback", types.FeedbackAnswer, body)


def inferences(after: str | None, limit: int, **filters: Any) -> Call[types.InferenceLog]:
    return Call("GET", "/v1/inferences", types.InferenceLog, params=_given(filters, after, limit))


def experts() -> Call[types.ExpertList]:
    return Call("GET", "/v1/experts", types.ExpertList, admin=True)


def expert(name: str) -> Call[types.ShownExpert]:
    return Call("GET", _path("/v1/experts", name), types.ShownExpert, admin=True)


def upload_expert(package: bytes, now: bool) -> Call[types.Expert]:
    headers = {"content-type": "application/octet-stream"}
    path = "/v1/experts?now=true" if now else "/v1/experts"
    return Call("POST", path, types.Expert, content=package, headers=headers, admin=True)


def install_expert(path: str, options: Mapping[str, Any]) -> Call[types.Expert]:
    return Call("POST", "/v1/experts", types.Expert, {"path": path, **options}, admin=True)


def act_on_expert(name: str, action: str) -> Call[types.ChangedExpert]:
    path = _path("/v1/experts", name) + f"/{action}"
    return Call("POST", path, types.ChangedExpert, admin=True)


def change_expert(name: str, changes: Mapping[str, str]) -> Call[types.Expert]:
    return Call("PATCH", _path("/v1/experts", name), types.Expert, changes, admin=True)


def remove_expert(name: str) -> Call[types.DeletedExpert]:
    return Call("DELETE", _path("/v1/experts", name), types.DeletedExpert, admin=True)


def _path(folder: str, name: str) -> str:
    if not name:
        raise ValueError("a name or id must not be empty")
    return f"{folder}/{quote(name, safe='@')}"


def _given(filters: Mapping[str, Any], after: str | None, limit: int) -> dict[str, Any]:
    params = {**filters, "after": after, "limit": limit}
    return {name: value for name, value in params.items() if value is not None}
