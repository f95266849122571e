"""API keys: who may send requests, as which tenant, and with which scheduling rights.

A tenant is a stable digest of its key, so that keys never reach logs, caches or workers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coterie.core.config import ServerSettings
from coterie.core.errors import ConfigError, Forbidden, MisdirectedRequest, Unauthenticated
from coterie.core.request import MAX_PRIORITY, OPEN_TENANT, KeyRights

# an admin who reads what both callers and admins may: receipts, and the stream of the dashboard; no
# tenant has this name
ADMIN_TENANT = "*admin*"
RECEIPTS = "/v1/receipts"
# static files of the pages: public, contain no tenant data; and the stream of the dashboard
_PAGES = ("/dashboard", "/chat")
PAGE_EVENTS = "/v1/dashboard/events"
# what admins may read with their own key: figures of the server, and what depends on the tenant
_FOR_BOTH = frozenset({PAGE_EVENTS, RECEIPTS, "/metrics", "/v1/slo", "/load", "/version"})
# rights that may follow a key on its line: name -> (lowest, highest value)
_RIGHTS = {"priority": (0, MAX_PRIORITY), "max_running": (1, 4096)}
_TENANT = re.compile(r"[\w.-]{1,64}")
_ADMIN_PATHS = frozenset(
    {
        "/v1/experts",
        "/v1/config",
        "/v1/ensemble",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
_ADMIN_PREFIXES = ("/v1/experts/", "/v1/config/", "/v1/ensemble/")


def tenant_of(key: bytes) -> str:
    return hashlib.sha256(b"coterie tenant\0" + key).hexdigest()[:16]


class KeyRing:
    """The keys of one key file. A line is `KEY`, `KEY priority=9 max_running=8` or
    `KEY tenant=NAME`; without rights a key has those of `KeyRights`, and is a tenant of its own."""

    def __init__(
        self, keys: Iterable[bytes] | Mapping[bytes, KeyRights | str], word: str = "API key"
    ) -> None:
        """A key's value is its rights, or the name of its tenant."""
        given = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, KeyRights())
        self._keys = tuple(given)
        self._word = word
        # rights by tenant, of keys that are tenants of their own
        self.rights = {
            tenant_of(key): rights for key, rights in given.items() if not isinstance(rights, str)
        }
        # digest of a key -> the name of its tenant
        self._named = {tenant_of(key): name for key, name in given.items() if isinstance(name, str)}

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that keys name."""
        return frozenset(self._named.values())

    @classmethod
    def load(cls, path: Path, param: str = "server.api_key_file", word: str = "API key") -> KeyRing:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"cannot read the key file {path}: {error.strerror}", param=param
            ) from error
        keys: dict[bytes, KeyRights | str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and not words[0].startswith(b"#"):
                keys[words[0]] = _rights(words[1:], f"the key file {path}, line {number}", param)
        if not keys:
            raise ConfigError(f"the key file {path} holds no key: write one per line", param=param)
        return cls(keys, word)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant of the key in the headers. Raises if there is no valid key."""
        given = _key_in(headers)
        if given is None:
            raise Unauthenticated(
                f"no {self._word}: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        if not self._is_known(given):
            raise Unauthenticated(f"this {self._word} is not known here")
        digest = tenant_of(given)
        return self._named.get(digest, digest)

    def holds(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the key in the headers is one of these."""
        given = _key_in(headers)
        return given is not None and self._is_known(given)

    def _is_known(self, given: bytes) -> bool:
        # compare with every key, so that the time does not show which key was similar
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def is_open_to_all(path: Path) -> bool:
    """Whether every user of this machine may read or change it."""
    try:
        return bool(path.stat().st_mode & 0o006)
    except OSError:
        return False


@dataclass(slots=True)
class AccessKeys:
    """The keys of callers and the keys of admins. They are separate: a caller's key gives no admin
    right, an admin key gives no right to send requests. Without `callers` everybody may send
    requests; without `admins` nobody may use the admin endpoints."""

    callers: KeyRing | None = None
    admins: KeyRing | None = None

    def tenant(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        if _is_page(path, headers):
            return OPEN_TENANT
        for_both = path in _FOR_BOTH or path.startswith(RECEIPTS + "/")
        if for_both and self.admins is not None and self.admins.holds(headers):
            return ADMIN_TENANT
        if not is_admin_path(path):
            return self.callers.tenant(headers) if self.callers else OPEN_TENANT
        if self.admins is None:
            raise Forbidden(
                "nothing can be changed over HTTP here: start the server with "
                "--admin-key-file FILE (one key per line) and send a key of it as "
                "'Authorization: Bearer KEY'"
            )
        return self.admins.tenant(headers)

    def reader(self, headers: Headers) -> str | None:
        """Who reads what a probe need not know: the tenant of a caller's or an admin's key; None
        without a valid key, if keys are needed."""
        headers = list(headers)
        if self.admins is not None and self.admins.holds(headers):
            return ADMIN_TENANT
        if self.callers is None:
            return OPEN_TENANT
        return self.callers.tenant(headers) if self.callers.holds(headers) else None

    def rights(self) -> dict[str, KeyRights] | None:
        """Scheduling rights by tenant; those of named tenants are in their settings. None = there
        are no keys, and everybody has every right."""
        return None if self.callers is None else self.callers.rights

    def adopt(self, other: AccessKeys) -> None:
        """Use the keys of `other` from now on."""
        self.callers, self.admins = other.callers, other.admins

    def check_tenants(self, tenants: Collection[str], param: str = "server.api_key_file") -> None:
        """Refuse keys of tenants that the settings do not have."""
        named = frozenset() if self.callers is None else self.callers.tenants
        for name in sorted(named.difference(tenants)):
            listed = ", ".join(tenants) or "none"
            raise ConfigError(
                f"{param}: a key belongs to the tenant {name!r}, and there is no [[tenants]] with "
                f"this name; there is: {listed}",
                param=param,
            )


def _rights(words: Sequence[bytes], where: str, param: str) -> KeyRights | str:
    """Read `priority=9 max_running=8`, either one, or nothing; or `tenant=NAME`. The error does not
    repeat a wrong word: it may be part of a key."""
    rights: dict[str, int] = {}
    if len(words) == 1 and words[0].startswith(b"tenant="):
        # what is not UTF-8 is no name
        tenant = words[0].decode("utf-8", "replace").partition("=")[2]
        if not _TENANT.fullmatch(tenant):
            raise ConfigError(
                f"{where}: tenant= takes a name of letters, digits and . _ -, at most 64",
                param=param,
            )
        return tenant
    for word in words:
        name, _, value = word.decode("latin-1").partition("=")
        low, high = _RIGHTS.get(name, (0, -1))
        if not (value.isascii() and value.isdigit() and low <= int(value[:9]) <= high):
            raise ConfigError(
                f"{where}: behind a key there may be priority=0..{MAX_PRIORITY} and "
                "max_running=1..4096, apart by spaces, or tenant=NAME alone",
                param=param,
            )
        rights[name] = int(value)
    return KeyRights(**rights)


def load_keys(server: ServerSettings) -> AccessKeys:
    """Both key rings that the settings name."""

    def ring(file: str, param: str, word: str) -> KeyRing | None:
        return KeyRing.load(Path(file), param, word) if file else None

    return AccessKeys(
        ring(server.api_key_file, "server.api_key_file", "API key"),
        ring(server.admin_key_file, "server.admin_key_file", "admin key"),
    )


def exposed_key_files(server: ServerSettings) -> list[Path]:
    """The files with keys that every user of this machine can read."""
    files = [
        Path(file) for file in (server.api_key_file, server.admin_key_file, server.tls_key) if file
    ]
    return [file for file in files if is_open_to_all(file)]


def is_admin_path(path: str) -> bool:
    return path in _ADMIN_PATHS or path.startswith(_ADMIN_PREFIXES)


def accepts_html(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a browser asks: `/` is a page for it, and JSON for programs."""
    return any(name == b"accept" and b"text/html" in value.lower() for name, value in headers)


def _is_page(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    if path == "/":
        return accepts_html(headers)
    return any(path == page or path.startswith(page + "/") for page in _PAGES)


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    bearer: bytes | None = None
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].strip()
    return bearer


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Of the names only `localhost` counts: any other
    name may resolve to any address."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, has_keys: bool, insecure: bool) -> None:
    """Refuse to serve without keys on a public address, unless the operator says it is intended."""
    if is_loopback(host) or has_keys or insecure:
        return
    raise ConfigError(
        f"binding {host} without API keys would let anyone on the network in: "
        "give --api-key-file FILE, or --insecure if that is what you want",
        param="server.host",
    )


MAX_SHOWN = 100
_ORIGIN_HEADERS = frozenset(
    {b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"}
)
Headers = Iterable[tuple[bytes, bytes]]


# what a browser says of a request that no page of another origin made
_OWN_SITES = frozenset({"same-origin", "none"})


class OriginCheck:
    """Refuses requests of foreign web pages. `has_keys`: with keys, any host name is accepted if
    none is listed, because a web page does not know a key.

    This is what keeps pages from posting prompts, because most routes read a body of any content
    type (`door.reads_any_type`): a page needs nobody's permission to post a text or a form. A
    browser sends `Origin` with every POST. Where it is missing, `Sec-Fetch-Site` decides; programs
    send neither. A page's script can set none of the three headers."""

    def __init__(self, server: ServerSettings, has_keys: bool) -> None:
        self._origins = frozenset(normal_origin(origin) for origin in server.cors_origins)
        names = {name.lower().rstrip(".") for name in server.allowed_hosts}
        self._any_host = "*" in names or (has_keys and not names)
        self._names = frozenset(names | {"localhost", server.host.lower()})

    def check(self, headers: Headers, method: str = "GET") -> None:
        """Refuse a request that was not meant for this server."""
        given = {name: value for name, value in headers if name in _ORIGIN_HEADERS}
        host, origin = _lower(given.get(b"host")), _lower(given.get(b"origin"))
        if host is not None and not self._any_host and not self._is_ours(host):
            raise MisdirectedRequest(
                f"this server is not {_shown(host)}: ask it by its address or as localhost, or "
                "start it with --allowed-hosts NAME"
            )
        if origin is not None and not self._may_call(origin, host):
            raise Forbidden(
                f"pages of {_shown(origin)} may not call this server: start it with "
                "--cors-origins ORIGIN"
            )
        if origin is None and self._is_foreign_fetch(given, method):
            raise Forbidden(
                "pages of other sites may not call this server: start it with "
                "--cors-origins ORIGIN, and let the page send its origin"
            )

    def _is_foreign_fetch(self, given: Mapping[bytes, bytes], method: str) -> bool:
        """Whether a page of another origin made a request that has no `Origin`. Another port of
        this machine is the same site and still foreign. A link to a page of this server is not
        refused: it changes nothing, and only the person who follows it reads the answer."""
        site = _lower(given.get(b"sec-fetch-site"))
        if site is None or site in _OWN_SITES or "*" in self._origins:
            return False
        is_link = (
            method in ("GET", "HEAD")
            and given.get(b"sec-fetch-mode") == b"navigate"
            and given.get(b"sec-fetch-dest") == b"document"
        )
        return not is_link

    def _is_ours(self, host: str) -> bool:
        """Whether the Host header names this server. An IP address always does: it cannot be made
        to point elsewhere, as a DNS name can."""
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
            # `null` names nobody: sandboxed frames, files, redirects across origins
            return bool(host) and urlsplit(origin).netloc == host
        except ValueError:
            return False


def normal_origin(origin: str) -> str:
    """An origin as browsers send it."""
    return origin.strip().rstrip("/").lower()


def _lower(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1").strip().lower()


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _shown(text: str) -> str:
    """A header's text, shortened for a message: it may be anything."""
    return "".join(char if "!" <= char <= "~" else "?" for char in text[:MAX_SHOWN])
