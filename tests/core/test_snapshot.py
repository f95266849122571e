"""core/snapshot.py and core/references.py: one value of settings, and names that must exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.config import Config, load
from coterie.core.ensemble import RemoteSettings, TenantSettings
from coterie.core.plan import AdapterChoice
from coterie.core.references import reference_faults, unserved_intents
from coterie.core.request import EVERY_RIGHT, KeyRights
from coterie.core.snapshot import changes, snapshot_of

EIGHT = Path(__file__).resolve().parents[2] / "examples" / "eight.toml"
FILE = """
[[specialists]]
name = "general"
[[specialists]]
name = "sql.slo"
fallback = "json"
intents = ["sql"]
[[specialists]]
name = "json"
[[intents]]
name = "sql"
[[tenants]]
name = "acme"
priority = 7
max_running = 3
specialists = ["json", "general"]
"""


def settings(tmp_path: Path, text: str = FILE) -> Config:
    path = tmp_path / "coterie.toml"
    path.write_text(text)
    return load(path)


def faults(config: Config) -> list[str]:
    names = [item.name for item in config.specialists]
    return [error.message for error in reference_faults(config, names, ("json", "python"))]


def test_the_example_has_eight_specialists_and_no_fault() -> None:
    config = load(EIGHT)
    names = [item.name for item in config.specialists]
    assert len(names) == 8 and not config.specialists[0].adapters
    assert not list(reference_faults(config, names, ("json", "sql"))) and not unserved_intents(
        config
    )


def test_digest_names_what_decides(tmp_path: Path) -> None:
    config = settings(tmp_path)
    names = [item.name for item in config.specialists]
    digest = snapshot_of(config, names).digest
    assert digest == snapshot_of(settings(tmp_path), names).digest
    # two servers on two ports answer alike
    assert (
        digest == snapshot_of(replace(config, server=replace(config.server, port=1)), names).digest
    )
    tenants = (replace(config.tenants[0], requests_per_minute=5),)
    fixed = {"json": (AdapterChoice("a@1", "d1"),)}
    newer = {"json": (AdapterChoice("a@1", "d2"),)}
    others = {
        snapshot_of(replace(config, tenants=tenants), names).digest,
        snapshot_of(config, names, fixed).digest,
        snapshot_of(config, names, newer).digest,
        digest,
    }
    assert len(others) == 4


def test_rights_of_tenants_and_keys(tmp_path: Path) -> None:
    config = settings(tmp_path)
    names = [item.name for item in config.specialists]
    snapshot = snapshot_of(config, names, rights={"ab12": KeyRights(2)})
    assert snapshot.rights_of("acme") == KeyRights(7, 3, 1.0)
    assert snapshot.rights_of("acme+salt") == KeyRights(7, 3)
    assert snapshot.rights_of("ab12+x") == KeyRights(2)
    assert snapshot.rights_of("gone") is None
    assert snapshot_of(config, names).rights_of("anyone") == EVERY_RIGHT
    assert snapshot.may_use("acme+salt") == ("json", "general") and snapshot.may_use("ab12") == ()


def test_fallbacks_end_at_the_first_specialist(tmp_path: Path) -> None:
    config = settings(tmp_path)
    snapshot = snapshot_of(config, [item.name for item in config.specialists])
    assert snapshot.fallbacks("sql.slo") == ("json", "general")
    assert snapshot.fallbacks("json") == ("general",)
    assert snapshot.fallbacks("general") == ()
    # the first one with a fallback, whose own fallback is nobody's but the first's
    first = replace(config.specialists[0], fallback="json")
    config = replace(config, specialists=(first, *config.specialists[1:]))
    snapshot = snapshot_of(config, [item.name for item in config.specialists])
    assert snapshot.fallbacks("general") == ("json",) and snapshot.fallbacks("json") == ("general",)
    assert not faults(config)


@pytest.mark.parametrize(
    ("before", "after", "name", "restart"),
    [
        ("priority = 7", "priority = 6", "tenants.acme.priority", False),
        ('name = "acme"', 'name = "other"', "tenants", False),
        ('[[intents]]\nname = "sql"', '[[intents]]\nname = "sql"\nhigh_stakes = true',
         "intents.sql.high_stakes", False),
        ('fallback = "json"', 'fallback = "general"', "specialists.sql.slo.fallback", False),
        ('fallback = "json"', 'fallback = "json"\nslo = { correctness = 0.5 }',
         "specialists.sql.slo.slo.correctness", False),
        # a specialist's name may look like a table that can change
        ('fallback = "json"', 'fallback = "json"\ndtype = "int8"',
         "specialists.sql.slo.dtype", True),
        ('fallback = "json"', 'fallback = "json"\nmoe = { strategy = "lru" }',
         "specialists.sql.slo.moe.strategy", True),
        ('name = "json"', 'name = "json2"', "specialists", True),
        ("[[intents]]", "[server]\nport = 1\n[[intents]]", "server.port", True),
        ("[[intents]]", "[engine]\nmax_queue = 1\n[[intents]]", "engine.max_queue", True),
        ("[[intents]]", "[ensemble]\nwindow_s = 5\n[[intents]]", "ensemble.window_s", False),
        ("[[intents]]", "[ensemble]\nmax_receipts = 5\n[[intents]]", "ensemble.max_receipts", True),
        ("[[intents]]", "[routing]\nthreshold = 0.5\n[[intents]]", "routing.threshold", False),
    ],
)  # fmt: skip
def test_changes_are_named(
    tmp_path: Path, before: str, after: str, name: str, restart: bool
) -> None:
    assert before in FILE
    old = settings(tmp_path)
    (change,) = changes(old, settings(tmp_path, FILE.replace(before, after, 1)))
    assert (change.name, change.needs_restart) == (name, restart)


def test_nothing_changed(tmp_path: Path) -> None:
    assert changes(settings(tmp_path), settings(tmp_path)) == ()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('fallback = "json"', 'fallback = "jsn"', "not a specialist here; did you mean 'json'?"),
        ('fallback = "json"', 'fallback = "sql.slo"', "cannot be its own fallback"),
        ('intents = ["sql"]', 'intents = ["sequel"]', "'sequel' is not an intent here"),
        ('intents = ["sql"]', 'intents = ["sql", "sql"]', "'sql' is listed twice"),
        ('intents = ["sql"]', 'checks = ["jsn"]', "not a check here; did you mean 'json'?"),
        ('["json", "general"]', '["gneral"]', "did you mean 'general'?"),
        ('[[intents]]\nname = "sql"', '[[intents]]\nname = "sql"\n[[intents]]\nname = "sql"',
         "two intents are named 'sql'"),
        ("[[tenants]]", '[[tenants]]\nname = "0123456789abcdef"\n[[tenants]]', "looks like"),
    ],
)  # fmt: skip
def test_faults_are_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in FILE
    (fault,) = faults(settings(tmp_path, FILE.replace(before, after, 1)))
    assert words in fault


def test_circles_are_reported_once(tmp_path: Path) -> None:
    text = "".join(
        f'[[specialists]]\nname = "{name}"\nfallback = "{after}"\n'
        for name, after in ("ab", "bc", "ca", "da")
    )
    (fault,) = faults(settings(tmp_path, text))
    assert "the fallbacks go in a circle: a -> b -> c -> a" in fault


@pytest.mark.parametrize(
    ("remote", "words"),
    [
        ({"url": "ftp://host/v1"}, "a base URL such as"),
        ({"url": "http://"}, "a base URL such as"),
        ({"url": "http://host:99999/v1"}, "a base URL such as"),
        ({"url": "http://[::1/v1"}, "a base URL such as"),
        ({"url": "https://me:s3cret@host/v1"}, "no keys in a URL"),
        ({"url": "https://host/v1?key=s3cret"}, "no keys in a URL"),
        ({"url": "http://host/v1", "key_env": "A", "key_file": "b"}, "not both"),
        ({"key_env": "A"}, "needs the URL"),
    ],
)
def test_remotes(remote: dict[str, Any], words: str) -> None:
    base = load(None).specialists[0]
    config = replace(
        load(None), specialists=(replace(base, name="far", remote=RemoteSettings(**remote)),)
    )
    (fault,) = faults(config)
    assert words in fault and "s3cret" not in fault


def test_a_remote_has_no_model_here() -> None:
    base = replace(load(None).specialists[0], name="far", remote=RemoteSettings("http://h/v1"))
    assert not faults(replace(load(None), specialists=(base,)))
    both = replace(base, dtype="int8", adapters=("x",))
    found = faults(replace(load(None), specialists=(both,)))
    assert len(found) == 2 and all("has none here" in text for text in found)


def test_tenants_of_default_settings_have_no_quota() -> None:
    tenant = TenantSettings("x")
    assert not tenant.requests_per_minute and not tenant.tokens_per_minute
