"""A pytest plugin for foreign test files: absent modules of theirs, and a report of outcomes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.foreign.stubs import install

install(("vllm", "sglang", "openai_harmony"))
_outcomes: dict[str, tuple[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of a test's phases, with what went wrong in it and where."""
    if _outcomes.get(report.nodeid, ("", ""))[0] != "failed" and (
        report.when == "call" or report.outcome != "passed"
    ):
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    why = "" if crash is None else f"line {crash.lineno}: {' '.join(crash.message.split())[:400]}"
    _outcomes[report.nodeid] = (report.outcome, why)
    Path(os.environ["FOREIGN_REPORT"]).write_text(json.dumps(_outcomes))
