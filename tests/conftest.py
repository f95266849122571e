"""Fixtures every package's tests share: a COTERIE_HOME of the process, the default model's file."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.folders import begin_run, leaks, temporary_folder
from tests.helpers.serving.server_process import own_home

# before anything is put into the temporary folder
BEGAN_RUN = begin_run()

ROOT = Path(__file__).resolve().parent.parent

# suites of others, with conftests of their own
collect_ignore = ["foreign", "clients"]

# What is downloaded, compiled or measured is kept between runs: `make test` pays for it once. The
# rest is of this process: what an operator says of a specialist outlives its server, and tests of
# other processes have specialists of the same name.
KEPT = ("kernels", "models", "routing", "state/machine")
os.environ["COTERIE_HOME"] = str(ROOT / ".cache" / "home")
HOME = temporary_folder("coterie-home-")
os.environ["COTERIE_HOME"] = str(own_home(HOME, shared=KEPT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests run beside each other and beside servers of theirs: OpenMP's threads that wait for one that
# has no core spin and take the cores from all. A tiny model is quickest on one thread; what is to
# be right on any number asks for `several_threads`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# a busy machine is no fault of a test's, so that no example of hypothesis has a deadline, here and
# where a test says so itself; some suites run where hypothesis is not installed
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


# files of few tests that take long: begun first, so that no process is left with one at the end
LONG_FILES = {
    "test_chat_page.py",
    "test_dashboard_page.py",
    "test_busy_start.py",
    "test_commands.py",
    "test_concurrent.py",
    "test_crash.py",
    "test_default_model.py",
    "test_doors.py",
    "test_expert_reproduces.py",
    "test_grammar_schemas.py",
    "test_learnt.py",
    "test_match.py",
    "test_match_set.py",
    "test_sdk_docs.py",
    "test_supervision.py",
    "test_tiny.py",
    "test_triton.py",
    "test_triton_patches.py",
}


# files that use a server which a conftest starts once per process: they run in one process
SHARED_SERVERS = {"api": r"\b(strict_|taught_)?server: Served\b", "sdk": ""}
# so do those that use the child in which Triton's kernels are interpreted
INTERPRETED = r"triton_interpreter import .*\binterpreted\b"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, where the files of a shared server or child count as one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class BySharedServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0])

    return BySharedServer(config, log)


@cache
def _scope(file: str) -> str:
    """The folder, for a file that uses its server; what it is called, for the child; else the
    file."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8")
    if re.search(INTERPRETED, text):
        return "interpreted"
    pattern = SHARED_SERVERS.get(path.parent.name)
    uses = pattern is not None and re.search(pattern, text)
    return str(path.parent) if uses else file


# every test of it is marked `full`, and to collect it takes seconds in every process
FULL_FILE = "test_schemathesis_whole.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    slice_only = config.option.markexpr == "not full"
    return True if slice_only and collection_path.name == FULL_FILE else None


def pytest_sessionstart() -> None:
    """What is imported and collected stays to the end: the garbage collector need not visit it."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if something of ours is left in the temporary folder: what made it, a server,
    a command or a test, leaves it on every machine."""
    if BEGAN_RUN and (left := leaks()):
        names = "\n  ".join(left)
        print(f"\n\nFAILED: left in the temporary folder of this run:\n  {names}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        if _measures_processor_time(item):
            item.add_marker("no_cover")
    # of tests that share an id, `--dist loadfile` runs one and tells nobody
    counts = Counter(item.nodeid for item in items)
    shared = [name for name, count in counts.items() if count > 1]
    if shared:
        raise pytest.UsageError(f"tests that share an id: {', '.join(shared)}")


def _measures_processor_time(item: pytest.Item) -> bool:
    """Counting the lines that run would be part of what is measured."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and not {"thread_time", "process_time"}.isdisjoint(code.co_names)


def pytest_itemcollected(item: pytest.Item) -> None:
    """pytest 9.2 takes the operation from the ids of schemathesis' tests."""
    label = getattr(item, "operation_label", None)
    if label is not None and label not in item.nodeid:
        item._id = item.id.with_params(label)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, fetched on the first use."""
    from coterie.weights.sources.source import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """An engine in this process takes the machine's cores; the next test begins as the first."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def several_threads() -> None:
    """Native kernels and torch on as many threads as there are cores, and at least two."""
    import torch

    torch.set_num_threads(max(2, len(os.sched_getaffinity(0))))


@pytest.fixture
def private_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty COTERIE_HOME with a short path (ipc sockets have a length limit)."""
    path = temporary_folder()
    monkeypatch.setenv("COTERIE_HOME", str(path))
    return path
