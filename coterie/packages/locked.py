"""One writer at a time, between processes: SQLite's own lock, on every platform it runs on."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.core.errors import Unavailable, WeightsError

WAIT_S = 20.0


def connect(path: Path) -> sqlite3.Connection:
    """A database in WAL mode, without transactions of Python's own making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WAIT_S
    while True:
        made = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            # changing the mode does not wait for others by itself
            made.execute("PRAGMA journal_mode=WAL")
            made.execute("PRAGMA synchronous=NORMAL")
            return made
        except sqlite3.OperationalError as error:
            made.close()
            if time.monotonic() > deadline:
                raise Unavailable(f"{path}: another process keeps it locked ({error}).") from error
            time.sleep(0.02)
        except sqlite3.DatabaseError as error:
            made.close()
            raise WeightsError(f"{path}: damaged ({error}). Move it away.") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of it or nothing; others wait."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise Unavailable(f"another process keeps the registry locked ({error}).") from error
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Holds the lock file `path` while the block runs."""
    connection = connect(path)
    try:
        with transaction(connection):
            yield
    finally:
        connection.close()
