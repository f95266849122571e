"""API keys: who may ask, and which tenant they are.

A tenant is a stable digest of its key, so that keys never reach logs, caches or workers.
Knows no routes: the door in `exchange.py` asks before anything is read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import ConfigError, Forbidden, Unauthenticated
from coterie.core.sections import Server

# without keys everyone is the same tenant
OPEN_TENANT = "local"
_ADMIN_PATHS = frozenset({"/v1/experts", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


def tenant_of(key: bytes) -> str:
    return hashlib.sha256(b"coterie tenant\0" + key).hexdigest()[:16]


class KeyRing:
    """The keys of one key file, read once at start."""

    def __init__(self, keys: Iterable[bytes], word: str = "API key") -> None:
        self._keys = tuple(keys)
        self._word = word

    @classmethod
    def load(cls, path: Path, param: str = "server.api_key_file", word: str = "API key") -> KeyRing:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"cannot read the key file {path}: {error.strerror}", param=param
            ) from error
        keys = [line.strip() for line in lines]
        keys = [key for key in keys if key and not key.startswith(b"#")]
        if not keys:
            raise ConfigError(f"the key file {path} holds no key: write one per line", param=param)
        return cls(keys, word)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant whose key the headers carry."""
        given = _key_in(headers)
        if given is None:
            raise Unauthenticated(
                f"no {self._word}: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        # every key is compared, so that the time tells nothing about which one was near
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise Unauthenticated(f"this {self._word} is not known here")
        return tenant_of(given)


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may ask, and who may change what is served. Two separate rings: a key of one opens
    nothing of the other. Without `callers` everybody may ask; without `admins` nobody may change
    anything."""

    callers: KeyRing | None = None
    admins: KeyRing | None = None

    def tenant(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        if not is_admin_path(path):
            return self.callers.tenant(headers) if self.callers else OPEN_TENANT
        if self.admins is None:
            raise Forbidden(
                "experts cannot be changed over HTTP here: start the server with "
                "--admin-key-file FILE (one key per line) and send a key of it as "
                "'Authorization: Bearer KEY'"
            )
        return self.admins.tenant(headers)


def load_keys(server: Server) -> Keys:
    """Both rings as the settings name them."""

    def ring(file: str, param: str, word: str) -> KeyRing | None:
        return KeyRing.load(Path(file), param, word) if file else None

    return Keys(
        ring(server.api_key_file, "server.api_key_file", "API key"),
        ring(server.admin_key_file, "server.admin_key_file", "admin key"),
    )


def is_admin_path(path: str) -> bool:
    return path in _ADMIN_PATHS or path.startswith("/v1/experts/")


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    found: bytes | None = None
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found = value[7:].strip()
    return found


def is_loopback(host: str) -> bool:
    """Addresses by their range; of names only `localhost`, because any other may point anywhere."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, has_keys: bool, insecure: bool) -> None:
    """Refuses to put an open door on a public address by accident."""
    if is_loopback(host) or has_keys or insecure:
        return
    raise ConfigError(
        f"binding {host} without API keys would let anyone on the network in: "
        "give --api-key-file FILE, or --insecure if that is what you want",
        param="server.host",
    )
