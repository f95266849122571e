"""Reads from disk: what they count, what they leave in the page cache, and how they fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.moe.store.base import ExpertShape
from coterie.moe.store.checkpoint import CheckpointStore
from coterie.moe.store.disk import PAGE, DiskReader, aligned_buffer, covering_pages
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import DenseWeight
from tests.helpers.moe import store_files

SIZE = 40 * PAGE + 123


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    forget(path)
    return path


def forget(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def cached_pages(path: Path) -> int:
    """Pages of `path` in the page cache, as the kernel says (mincore)."""
    size = path.stat().st_size
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), size) as data:
        flags = (ctypes.c_ubyte * (-(-size // PAGE)))()
        anchor = ctypes.c_char.from_buffer(data)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), flags) == 0
        del anchor
        return sum(flag & 1 for flag in flags)


def read_from_device() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


RANGES = [(0, 1), (5, PAGE), (PAGE, PAGE), (3 * PAGE - 1, 2), (7, 20 * PAGE), (SIZE - 9, 9)]


@pytest.mark.parametrize("reads", ["auto", "buffered"])
@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_any_range(file: Path, reads: str, offset: int, nbytes: int) -> None:
    disk, buffer = DiskReader(reads), aligned_buffer(32 * PAGE)
    found = disk.read(file, offset, nbytes, buffer)
    assert found.numpy().tobytes() == file.read_bytes()[offset : offset + nbytes]
    assert disk.read_bytes == covering_pages(offset, nbytes).nbytes
    disk.close()


@pytest.mark.parametrize("reads", ["auto", "buffered"])
def test_nothing_stays_in_the_page_cache(file: Path, reads: str) -> None:
    disk, buffer = DiskReader(reads), aligned_buffer(64 * PAGE)
    assert cached_pages(file) == 0
    for offset, nbytes in RANGES:
        disk.read(file, offset, nbytes, buffer)
        assert cached_pages(file) == 0
    disk.close()
    file.read_bytes()
    assert cached_pages(file) > 0  # the measure can see


@pytest.mark.parametrize("reads", ["auto", "buffered"])
def test_counted_bytes_are_what_the_kernel_read(tmp_path: Path, reads: str) -> None:
    path = store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    checkpoint = open_checkpoint(path)
    store = store_files.opened(checkpoint, reads=reads)
    out = aligned_buffer(store.slot_bytes)
    keys = store.geometry.keys()
    store.read(keys[0], out)  # opens, and reads the file system's own blocks
    forget(path / "model.safetensors")
    checkpoint.release()
    before, counted = read_from_device(), store.disk.read_bytes
    total = sum(store.read(key, out) for key in keys)
    grown = read_from_device() - before
    if grown == 0:
        pytest.skip("this folder lies on no block device")
    assert total == store.disk.read_bytes - counted == grown
    assert cached_pages(path / "model.safetensors") == 0


def test_truncated_and_missing_files(file: Path) -> None:
    disk, buffer = DiskReader(), aligned_buffer(64 * PAGE)
    with pytest.raises(WeightsError, match="truncated"):
        disk.read(file, SIZE - 10, 20, buffer)
    with pytest.raises(WeightsError, match="truncated"):
        disk.read(file, SIZE + 5 * PAGE, 20, buffer)
    with pytest.raises(WeightsError, match="No such file"):
        disk.read(file.with_name("other"), 0, 20, buffer)
    with pytest.raises(ValueError, match="at a page"):
        disk.read(file, 0, 20, buffer[1:])


class Faulty(DiskReader):
    """Fails, hands out little, or waits until several threads are inside, as told."""

    error = 0
    most_bytes = 1 << 40
    together: threading.Barrier | None = None

    def pread(self, number: int, view: memoryview, offset: int) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        if self.together is not None:
            self.together.wait(30)
        return super().pread(number, view[: self.most_bytes], offset)


@pytest.mark.parametrize("reads", ["auto", "buffered"])
def test_short_reads_are_continued(file: Path, reads: str) -> None:
    disk, buffer = Faulty(reads), aligned_buffer(64 * PAGE)
    disk.most_bytes = 2 * PAGE
    found = disk.read(file, 100, 30 * PAGE, buffer)
    assert found.numpy().tobytes() == file.read_bytes()[100 : 100 + 30 * PAGE]


def test_a_read_error_is_typed_and_the_next_read_works(tmp_path: Path) -> None:
    weights = store_files.draw()
    checkpoint = open_checkpoint(store_files.write(tmp_path / "m", store_files.singles(weights)))
    disk = Faulty()
    shape = ExpertShape(store_files.HIDDEN, store_files.INNER, True)
    store = CheckpointStore(
        checkpoint, store_files.GEOMETRY, store_files.NAMES, shape, "auto", disk
    )
    disk.error = errno.EIO
    with pytest.raises(WeightsError, match="Input/output error"):
        store_files.parts_of(store, (0, 0))
    disk.error = 0
    store_files.expect(store, weights)


def test_memory_without_direct_reads_falls_back(file: Path) -> None:
    class Refuses(DiskReader):
        def pread(self, number: int, view: memoryview, offset: int) -> int:
            if self.is_direct(file):
                raise OSError(errno.EINVAL, "no direct reads here")
            return super().pread(number, view, offset)

    disk, buffer = Refuses(), aligned_buffer(64 * PAGE)
    if not disk.is_direct(file):
        pytest.skip("no direct reads on this file system")
    found = disk.read(file, 5, 100, buffer)
    assert found.numpy().tobytes() == file.read_bytes()[5:105] and not disk.is_direct(file)


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    weights = store_files.draw()
    checkpoint = open_checkpoint(store_files.write(tmp_path / "m", store_files.singles(weights)))
    disk = Faulty()
    disk.together = threading.Barrier(8)  # broken, and an error, unless 8 reads are under way
    shape = ExpertShape(store_files.HIDDEN, store_files.INNER, True)
    store = CheckpointStore(
        checkpoint, store_files.GEOMETRY, store_files.NAMES, shape, "auto", disk
    )
    keys = store.geometry.keys() * 4
    with ThreadPoolExecutor(8) as pool:
        for key, found in zip(
            keys, pool.map(partial(store_files.parts_of, store), keys), strict=True
        ):
            assert all(torch.equal(found[part], weights[key][part]) for part in found)
    assert disk.read_bytes == sum(store.read_bytes(key) for key in keys)


def test_release_gives_pages_back_and_tensors_stay(tmp_path: Path) -> None:
    path = store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    checkpoint = open_checkpoint(path)
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    weight = checkpoint.read(name)
    assert isinstance(weight, DenseWeight)
    tensor = weight.tensor
    before = tensor.clone()
    forget(path / "model.safetensors")
    assert cached_pages(path / "model.safetensors") > 0  # mapped pages are not dropped by others
    checkpoint.release()
    assert cached_pages(path / "model.safetensors") == 0
    assert torch.equal(tensor, before)


def test_extents_are_where_the_bytes_are(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    )
    names = checkpoint.names()
    assert len(names) > 10
    for name in names:
        extent = checkpoint.extent(name)
        with extent.path.open("rb") as handle:
            handle.seek(extent.offset)
            assert handle.read(extent.nbytes) == checkpoint.raw(name).tobytes()
