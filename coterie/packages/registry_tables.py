"""The registry's tables: installed versions, and what each name means now and meant before.

SQL only; every method runs inside the registry's transaction, or reads a single row.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from coterie.core.adapters import AdapterCard

SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
  name TEXT, version TEXT, digest TEXT, kind TEXT, bases TEXT, virtual_tokens INTEGER,
  bytes INTEGER, installed_at REAL, signer TEXT, description TEXT, package TEXT,
  PRIMARY KEY (name, version));
CREATE TABLE IF NOT EXISTS meanings (
  alias TEXT PRIMARY KEY, name TEXT, version TEXT, pinned INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS history (
  id INTEGER PRIMARY KEY, alias TEXT, name TEXT, version TEXT);
CREATE TABLE IF NOT EXISTS loose (digest TEXT PRIMARY KEY, since REAL);
CREATE TABLE IF NOT EXISTS counter (id INTEGER PRIMARY KEY CHECK (id = 1), generation INTEGER);
INSERT OR IGNORE INTO counter VALUES (1, 0);
"""
_FORMAT = 1

_FACTS = (
    "v.name, v.version, digest, kind, bases, virtual_tokens, bytes, installed_at, signer, "
    "description, EXISTS (SELECT 1 FROM meanings m WHERE m.alias = v.name AND m.name = v.name "
    "AND m.version = v.version AND m.pinned)"
)
_CARD = f"SELECT {_FACTS} FROM versions v"
# number of earlier meanings that are stored per name
_MAX_HISTORY = 50


@dataclass(frozen=True, slots=True)
class AliasTarget:
    name: str
    version: str
    pinned: bool = False


class RegistryTables:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    def prepare(self) -> bool:
        """Creates the tables if they do not exist. False if a newer Coterie created them."""
        (version,) = self._sql.execute("PRAGMA user_version").fetchone()
        if version == 0:
            # executescript commits by itself; running this script twice does no harm
            self._sql.executescript(f"{SCHEMA} PRAGMA user_version = {_FORMAT};")
        return bool(version <= _FORMAT)

    def generation(self) -> int:
        return int(self._sql.execute("SELECT generation FROM counter").fetchone()[0])

    def changed(self) -> None:
        self._sql.execute("UPDATE counter SET generation = generation + 1")

    def cards(self, name: str | None = None) -> list[AdapterCard]:
        rows = self._sql.execute(
            f"{_CARD} WHERE :name IS NULL OR v.name = :name ORDER BY v.name", {"name": name}
        ).fetchall()
        return [_card(row) for row in rows]

    def card(self, name: str, version: str) -> AdapterCard | None:
        row = self._sql.execute(
            f"{_CARD} WHERE v.name = ? AND v.version = ?", (name, version)
        ).fetchone()
        return None if row is None else _card(row)

    def package(self, name: str, version: str) -> str:
        row = self._sql.execute(
            "SELECT package FROM versions WHERE name = ? AND version = ?", (name, version)
        ).fetchone()
        return "" if row is None else str(row[0])

    def add(self, card: AdapterCard, package: str) -> None:
        self._sql.execute(
            "INSERT OR REPLACE INTO versions VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            (
                card.name, card.version, card.digest, card.kind, json.dumps(card.bases),
                card.num_virtual_tokens, card.nbytes, card.installed_at, card.signer,
                card.description, package,
            ),
        )  # fmt: skip

    def drop(self, name: str, version: str) -> list[str]:
        """Returns the names and aliases that have no meaning after this."""
        query = "SELECT alias FROM meanings WHERE name = ? AND version = ?"
        aliases = [row[0] for row in self._sql.execute(query, (name, version))]
        for table in ("versions", "meanings", "history"):
            self._sql.execute(
                f"DELETE FROM {table} WHERE name = ? AND version = ?", (name, version)
            )
        return aliases

    def meaning(self, alias: str) -> AliasTarget | None:
        row = self._sql.execute(
            "SELECT name, version, pinned FROM meanings WHERE alias = ?", (alias,)
        ).fetchone()
        return None if row is None else AliasTarget(row[0], row[1], bool(row[2]))

    def meanings(self) -> dict[str, AdapterCard]:
        """Names and aliases -> what each means, read at one moment."""
        rows = self._sql.execute(
            f"SELECT n.alias, {_FACTS} FROM meanings n JOIN versions v "
            "ON v.name = n.name AND v.version = n.version ORDER BY n.alias"
        ).fetchall()
        return {row[0]: _card(row[1:]) for row in rows}

    def set_alias(self, alias: str, name: str, version: str, *, remember: bool = True) -> None:
        """Makes `alias` mean this version; its earlier meaning is stored for a rollback."""
        old = self.meaning(alias)
        if old is not None and remember and (old.name, old.version) != (name, version):
            self._sql.execute(
                "INSERT INTO history (alias, name, version) VALUES (?,?,?)",
                (alias, old.name, old.version),
            )
            self._sql.execute(
                "DELETE FROM history WHERE alias = :alias AND id NOT IN "
                "(SELECT id FROM history WHERE alias = :alias ORDER BY id DESC LIMIT :kept)",
                {"alias": alias, "kept": _MAX_HISTORY},
            )
        self._sql.execute(
            "INSERT INTO meanings (alias, name, version) VALUES (?,?,?) "
            "ON CONFLICT (alias) DO UPDATE SET name = excluded.name, version = excluded.version",
            (alias, name, version),
        )

    def delete_alias(self, alias: str) -> None:
        for table in ("meanings", "history"):
            self._sql.execute(f"DELETE FROM {table} WHERE alias = ?", (alias,))

    def pop_history(self, alias: str) -> AliasTarget | None:
        """Removes and returns the latest earlier meaning of `alias`."""
        row = self._sql.execute(
            "DELETE FROM history WHERE id = (SELECT max(id) FROM history WHERE alias = ?) "
            "RETURNING name, version",
            (alias,),
        ).fetchone()
        return None if row is None else AliasTarget(row[0], row[1])

    def meant_before(self, name: str, without: str) -> bool:
        """Whether a name meant another version than `without` before."""
        query = "SELECT 1 FROM history WHERE alias = ? AND NOT (name = ? AND version = ?)"
        return self._sql.execute(query, (name, name, without)).fetchone() is not None

    def pin(self, alias: str, on: bool) -> None:
        self._sql.execute("UPDATE meanings SET pinned = ? WHERE alias = ?", (on, alias))

    def is_used(self, digest: str) -> bool:
        query = "SELECT 1 FROM versions WHERE digest = ?"
        return self._sql.execute(query, (digest,)).fetchone() is not None

    def used(self) -> set[str]:
        return {row[0] for row in self._sql.execute("SELECT digest FROM versions")}

    def packages(self) -> set[str]:
        return {row[0] for row in self._sql.execute("SELECT package FROM versions")}

    def is_package_used(self, package: str) -> bool:
        query = "SELECT 1 FROM versions WHERE package = ?"
        return self._sql.execute(query, (package,)).fetchone() is not None

    def add_loose(self, digest: str, since: float) -> None:
        """Marks an adapter that may be in use although no version has it."""
        self._sql.execute("INSERT OR REPLACE INTO loose VALUES (?,?)", (digest, since))

    def date_back(self, now: float) -> None:
        """Marks of a time that is yet to come were made before the clock was set back."""
        self._sql.execute("UPDATE loose SET since = ? WHERE since > ?", (now, now))

    def loose_digests(self, before: float) -> list[str]:
        rows = self._sql.execute("SELECT digest FROM loose WHERE since <= ?", (before,))
        return [row[0] for row in rows]

    def is_loose(self, digest: str, after: float) -> bool:
        query = "SELECT 1 FROM loose WHERE digest = ? AND since > ?"
        return self._sql.execute(query, (digest, after)).fetchone() is not None

    def forget(self, digest: str) -> None:
        self._sql.execute("DELETE FROM loose WHERE digest = ?", (digest,))


def _card(row: tuple[object, ...]) -> AdapterCard:
    name, version, digest, kind, bases, tokens, nbytes, at, signer, description, pinned = row
    return AdapterCard(
        name=str(name), version=str(version), digest=str(digest), kind=str(kind),
        bases=tuple(json.loads(str(bases))), num_virtual_tokens=int(str(tokens)),
        nbytes=int(str(nbytes)), installed_at=float(str(at)), signer=str(signer),
        pinned=bool(pinned), description=str(description),
    )  # fmt: skip
