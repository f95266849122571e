"""Fixtures every package's tests share: a private COTERIE_HOME and the default model's file."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

# suites of others, with conftests of their own
collect_ignore = ["foreign", "clients"]

# Compiled kernels and the default model are kept between runs, so that `make test` pays for them
# once; a test that writes state uses its own home.
os.environ.setdefault(
    "COTERIE_HOME", str(Path(__file__).resolve().parent.parent / ".cache" / "home")
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# a busy machine is no fault of a test's; some suites run where hypothesis is not installed
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, fetched on the first use."""
    from coterie.weights.sources import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture
def private_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty COTERIE_HOME with a short path (ipc sockets have a length limit)."""
    path = Path(tempfile.mkdtemp(prefix="coterie-"))
    monkeypatch.setenv("COTERIE_HOME", str(path))
    return path
