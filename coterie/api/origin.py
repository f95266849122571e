"""Whether a request was meant for this server, or a web page was made to send it.

A page can have its own name point at a loopback address (DNS rebinding): `Host` then has a name
that is not ours. It can send some requests anywhere without asking: `Origin` then names the page.
Requests of programs have our name or address as `Host`, and no `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from coterie.core.errors import Forbidden, Misdirected
from coterie.core.sections import Server

MAX_SHOWN = 100
Headers = Iterable[tuple[bytes, bytes]]


class Origins:
    """`has_keys`: a page knows no key, so that any name will do where none are listed."""

    def __init__(self, server: Server, has_keys: bool) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in server.cors_origins)
        names = {name.lower().rstrip(".") for name in server.allowed_hosts}
        self._any_host = "*" in names or (has_keys and not names)
        self._names = frozenset(names | {"localhost", server.host.lower()})

    def check(self, headers: Headers) -> None:
        """Refuses what was not meant for us."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").strip().lower()
            elif name == b"origin":
                origin = value.decode("latin-1").strip().lower()
        if host is not None and not self._any_host and not self._is_ours(host):
            raise Misdirected(
                f"this server is not {_shown(host)}: ask it by its address or as localhost, or "
                "start it with --allowed-hosts NAME"
            )
        if origin is not None and not self._may_call(origin, host):
            raise Forbidden(
                f"pages of {_shown(origin)} may not call this server: start it with "
                "--cors-origins ORIGIN"
            )

    def _is_ours(self, host: str) -> bool:
        """An address cannot be made to point elsewhere."""
        name = _name_of(host)
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True

    def _may_call(self, origin: str, host: str | None) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            return host is not None and urlsplit(origin).netloc == host
        except ValueError:
            return False


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _shown(text: str) -> str:
    """It may be anything."""
    return "".join(char if "!" <= char <= "~" else "?" for char in text[:MAX_SHOWN])
