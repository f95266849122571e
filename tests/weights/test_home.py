"""Where files go: COTERIE_HOME, or the platform's user directories."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coterie.weights.home import home, kernels_dir, models_dir, state_dir


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COTERIE_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(sys, "platform", "linux")


def test_everything_is_below_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_HOME", "/data/coterie")
    assert home() == Path("/data/coterie")
    assert [models_dir(), kernels_dir(), state_dir()] == [
        Path("/data/coterie") / name for name in ("models", "kernels", "state")
    ]
    monkeypatch.setenv("COTERIE_HOME", "~/here")
    assert home() == Path("/home/someone/here")
    monkeypatch.setenv("COTERIE_HOME", "relative")
    assert home() == Path.cwd() / "relative"


def test_linux_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == Path("/home/someone/.cache/coterie")
    assert state_dir() == Path("/home/someone/.local/state/coterie/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert models_dir() == Path("/cache/coterie/models")
    assert state_dir() == Path("/home/someone/.local/state/coterie/state")


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home() == Path("/home/someone/Library/Caches/coterie")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert home() == Path("/local/coterie/Cache")
    assert state_dir() == Path("/local/coterie/state")
