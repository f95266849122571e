"""The server's certificate: read at start, and again when its files change.

A certificate lives for weeks and a server for longer: whoever renews it writes the files, and new
connections get the new one without a restart. If the new files cannot be used, the old certificate
stays, and the log says why, once.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from pathlib import Path

from coterie.core.config import ServerSettings
from coterie.core.errors import ConfigError
from coterie.obs.log import log

# the files are looked at no more often
LOOK_S = 5.0


class ServerCertificate:
    """`context` is for connections that begin now; `pem` is the same, as gRPC wants it."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError if they cannot be used."""
        self._files = (certificate, key)
        self._seen = _changed_at(self._files)
        self._context, self._pem = _read(*self._files)
        self._look_at = time.monotonic() + LOOK_S
        # gRPC asks from threads of its own
        self._lock = threading.Lock()

    @property
    def context(self) -> ssl.SSLContext:
        with self._lock:
            self._look()
            return self._context

    @property
    def pem(self) -> tuple[bytes, bytes]:
        """The private key and the certificates."""
        with self._lock:
            self._look()
            return self._pem

    def _look(self) -> None:
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        changed_at = _changed_at(self._files)
        if changed_at == self._seen:
            return
        self._seen = changed_at
        try:
            self._context, self._pem = _read(*self._files)
        except ConfigError as error:
            log("certificate_refused", level="error", reason=error.message)
        else:
            log("certificate_read", path=str(self._files[0]))


def certificate_of(server: ServerSettings) -> ServerCertificate | None:
    """None if the server speaks without TLS."""
    if not server.tls_cert:
        if server.tls_key:
            raise ConfigError(
                "a TLS key needs its certificate: --tls-cert", param="server.tls_cert"
            )
        return None
    # one file may hold both
    key = server.tls_key or server.tls_cert
    return ServerCertificate(Path(server.tls_cert).expanduser(), Path(key).expanduser())


def _read(certificate: Path, key: Path) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # without a password callback OpenSSL would ask on the terminal
        context.load_cert_chain(certificate, key, password=_no_password)
        pem = (key.read_bytes(), certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(certificate, key, error) from error
    return context, pem


def _no_password() -> bytes:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def _unusable(certificate: Path, key: Path, error: Exception) -> ConfigError:
    for path, name in ((certificate, "tls_cert"), (key, "tls_key")):
        if not os.access(path, os.R_OK) or not path.is_file():
            return ConfigError(f"{path}: cannot be read", param=f"server.{name}")
    reason = getattr(error, "reason", None) or str(error)
    return ConfigError(
        f"{certificate} and {key} are no certificate with its key ({reason}): both must be PEM "
        "files, the server's certificate first",
        param="server.tls_cert",
    )


def _changed_at(files: tuple[Path, ...]) -> tuple[tuple[int, int, int], ...]:
    """Changes when a file is written or replaced."""
    found = []
    for path in files:
        try:
            facts = path.stat()
            found.append((facts.st_mtime_ns, facts.st_ino, facts.st_size))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
