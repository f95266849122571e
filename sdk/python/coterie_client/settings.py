"""Address of the server, keys and timeouts. Arguments first, then environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from coterie_client.calls import Call

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 10.0
# servers close an idle connection after 5 s. If it is closed while a request is being sent, nobody
# knows whether the request ran
IDLE_S = 4.0


@dataclass(frozen=True)
class Settings:
    base_url: str
    api_key: str | None
    admin_key: str | None
    timeout_s: float | None
    max_retries: int

    def headers(self, call: Call[Any]) -> dict[str, str]:
        key = (self.admin_key or self.api_key) if call.admin else self.api_key
        return {**call.headers, **({"authorization": f"Bearer {key}"} if key else {})}


def settings(
    base_url: str | None,
    api_key: str | None,
    admin_key: str | None,
    timeout_s: float | None,
    max_retries: int,
) -> Settings:
    url = base_url or os.environ.get("COTERIE_BASE_URL") or DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must begin with http:// or https://, not {url!r}")
    if max_retries < 0:
        raise ValueError(f"max_retries must not be negative, not {max_retries}")
    return Settings(
        url.rstrip("/").removesuffix("/v1"),
        api_key or os.environ.get("COTERIE_API_KEY"),
        admin_key or os.environ.get("COTERIE_ADMIN_KEY"),
        timeout_s,
        max_retries,
    )
