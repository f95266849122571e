"""Kernels are right on any number of threads: their tests run on several."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_several_threads(several_threads: None) -> None:
    """For every test of this folder."""
