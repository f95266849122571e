"""One writer at a time between processes: by SQLite's own lock, which works on every platform."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.core.errors import ConfigError, Unavailable, WeightsError
from coterie.core.private_files import narrow_file, private_file, private_folder

WAIT_S = 20.0


def connect(path: Path) -> sqlite3.Connection:
    """A database in WAL mode, without Python's implicit transactions. Its folder and its files are
    for their owner alone."""
    deadline = time.monotonic() + WAIT_S
    try:
        private_folder(path.parent)
        # the files beside it get the mode of the database
        private_file(path)
        for suffix in ("-wal", "-shm"):
            narrow_file(path.with_name(path.name + suffix))
    except ConfigError as error:
        raise WeightsError(error.message, param=error.param) from error
    with database_errors(path):
        while True:
            connection = _open(path)
            try:
                # changing the mode does not wait for other connections by itself
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                return connection
            except sqlite3.Error as error:
                connection.close()
                if not _is_locked(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turns errors of the database at `path` into clear messages."""
    try:
        yield
    except sqlite3.Error as error:
        if _is_locked(error):
            raise Unavailable(f"{path}: another process keeps it locked. Try again.") from error
        raise WeightsError(f"{path}: {error}. Check the disk, or move it away.") from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commits everything or nothing; other writers wait."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Holds the lock file `path` during the block."""
    connection = connect(path)
    try:
        with database_errors(path), transaction(connection):
            yield
    finally:
        connection.close()


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)


def _is_locked(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
