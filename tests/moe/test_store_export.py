"""Exports: atomic, resumable after a kill, one at a time, and honest about what they found."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.core.errors import WeightsError
from coterie.moe.store.disk import DiskReader
from coterie.moe.store.export import ExportJournal, export
from coterie.moe.store.packed import EXPERTS_FILE, INDEX_FILE
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.moe import store_files

ROOT = Path(__file__).resolve().parent.parent.parent

SLOW_EXPORT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.helpers.moe import store_files
from coterie.moe.store.disk import DiskReader
from coterie.moe.store.export import export
from coterie.weights.checkpoint import open_checkpoint

class Slow(DiskReader):
    def pread(self, number, view, offset):
        time.sleep(0.15)
        return super().pread(number, view, offset)

checkpoint = open_checkpoint(Path(sys.argv[1]))
store = store_files.opened(checkpoint, "int8")
store.disk = Slow()
export(checkpoint, store, Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_files.write(
        tmp_path_factory.mktemp("model") / "m", store_files.singles(store_files.draw())
    )


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def killed(model: Path, target: Path, records: int) -> Path:
    """An export ended by SIGKILL after it had finished that many records."""
    code = SLOW_EXPORT.format(root=str(ROOT))
    child = subprocess.Popen([sys.executable, "-c", code, str(model), str(target)])
    journal = target.with_name(f"{target.name}.partial") / ExportJournal.NAME
    until = time.monotonic() + 60
    while not journal.exists() or len(journal.read_text().splitlines()) <= records:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not target.exists()
    return journal.parent


def run(model: Path, target: Path) -> tuple[int, int, int]:
    """(resumed, written, bytes read from the model)."""
    checkpoint = open_checkpoint(model)
    store = store_files.opened(checkpoint, "int8")
    done = export(checkpoint, store, target)
    return done.resumed, done.written, store.disk.read_bytes


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "p"
    assert run(model, target)[:2] == (0, 12)
    return content(target)


def test_a_killed_export_continues(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    partial = killed(model, tmp_path / "p", 3)
    # one finished record is spoilt, and the last line is torn
    with (partial / EXPERTS_FILE).open("r+b") as file:
        file.write(b"spoilt")
    with (partial / ExportJournal.NAME).open("a") as journal:
        journal.write("2 5 0123")
    finished = len((partial / ExportJournal.NAME).read_text().splitlines()) - 2
    resumed, written, read_bytes = run(model, tmp_path / "p")
    assert resumed == finished - 1 >= 2 and written == 12 - resumed
    keys = store_files.GEOMETRY.keys()
    assert read_bytes < sum(store_files.opened(model).read_bytes(key) for key in keys)
    assert content(tmp_path / "p") == whole
    assert not partial.exists()


def test_a_partial_of_other_weights_is_begun_anew(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    partial = tmp_path / "p.partial"
    partial.mkdir()
    journal = [f"{layer} {expert} {'0' * 64}" for layer in (0, 2) for expert in range(6)]
    (partial / ExportJournal.NAME).write_text("\n".join(['{"source": "other"}', *journal, ""]))
    (partial / EXPERTS_FILE).write_bytes(bytes(1 << 20))
    assert run(model, tmp_path / "p")[:2] == (0, 12)
    assert content(tmp_path / "p") == whole


def test_one_export_at_a_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.partial").mkdir()
    with (
        ExportJournal(tmp_path / "p.partial", {}),
        pytest.raises(WeightsError, match="another export"),
    ):
        run(model, tmp_path / "p")


def test_what_exists_is_not_touched(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    with pytest.raises(WeightsError, match="exists"):
        run(model, tmp_path / "p")
    assert [file.name for file in tmp_path.iterdir()] == ["p"]


def test_a_read_error_names_the_expert_and_keeps_what_is_done(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    class Fails(DiskReader):
        left = 5

        def pread(self, number: int, view: memoryview, offset: int) -> int:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "Input/output error")
            return super().pread(number, view, offset)

    checkpoint = open_checkpoint(model)
    store = store_files.opened(checkpoint, "int8")
    store.disk = Fails()
    with pytest.raises(WeightsError, match=r"expert \d of layer \d: .*Input/output"):
        export(checkpoint, store, tmp_path / "p")
    assert not (tmp_path / "p").exists()
    resumed, written, _ = run(model, tmp_path / "p")
    assert resumed >= 2 and resumed + written == 12
    assert content(tmp_path / "p") == whole


def test_progress_ends_at_the_total(model: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(model)
    store = store_files.opened(checkpoint)
    done = export(
        checkpoint, store, tmp_path / "p", lambda done, total: heard.append((done, total))
    )
    assert heard == sorted(heard) and len({total for _, total in heard}) == 1
    assert heard[-1][0] == heard[-1][1] == done.index.end + done.backbone_bytes


def test_an_export_of_a_store_is_the_store(
    model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    run(model, tmp_path / "p")
    checkpoint = open_checkpoint(tmp_path / "p")
    store = store_files.opened(checkpoint)
    export(checkpoint, store, tmp_path / "q")
    again = content(tmp_path / "q")
    assert {k: v for k, v in again.items() if k != INDEX_FILE} == {
        k: v for k, v in whole.items() if k != INDEX_FILE
    }
    assert store_files.opened(tmp_path / "q").lineage[1] == store.fingerprint


def test_a_folder_without_rights_is_a_typed_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="cannot be written"):
        run(model, tmp_path / "file" / "p")
    shutil.rmtree(tmp_path)
