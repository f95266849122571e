"""Seconds until an adapter of 5 MB can be used, depending on where it is stored.

    python -m benchmarks.adapters.switch [--threads 2] [--repeats 20]

resident: it is on the device. host: it was evicted from the device and is still in RAM. disk: it is
read, its digest checked, composed and copied to the device. package: an `.expert` file is read, its
signature and digests checked, unpacked and installed in the registry, then loaded as from disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.adapters.random_adapters import ALL_LINEAR, write_adapter
from benchmarks.peers import files
from coterie.adapters.files import AdapterLibrary
from coterie.adapters.pool import AdapterPool
from coterie.core.adapters import AdapterSettings
from coterie.core.plan import AdapterChoice
from coterie.models.base import CausalLM, load_model
from coterie.packages.archive import pack, repack
from coterie.packages.manifest import from_document
from coterie.packages.paths import CONFIG, WEIGHTS, digest_of
from coterie.packages.registry import AdapterRegistry
from coterie.packages.signing import new_key, public_of, read_key, signed
from coterie.packages.trust import TrustStore
from coterie.weights.checkpoint import open_checkpoint

RANK = 8
GOALS_MS = {"resident": 1.0, "host": 20.0, "disk": 100.0, "package": 100.0}


def wait_ready(pool: AdapterPool, stack: tuple[AdapterChoice, ...]) -> float:
    begin = time.perf_counter()
    pool.want(stack)
    key = pool.describe(stack).key
    while pool.state(key) != "ready":
        if pool.state(key) == "failed":
            raise pool.failure(key)
        pool.wait(0.001)
    pool.take(key)
    spent = time.perf_counter() - begin
    pool.release(key)
    return spent


class Stage:
    """Two adapters, and a device with room for one of them."""

    def __init__(self, model: CausalLM, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.made = [
            write_adapter(folder / f"made{seed}", model.spec, seed, RANK, ALL_LINEAR)
            for seed in range(2)
        ]
        self.nbytes = (self.made[0] / WEIGHTS).stat().st_size
        library = folder / "library"
        self.stacks = []
        for place in self.made:
            digest = digest_of(place)
            (library / digest).mkdir(parents=True)
            for name in (CONFIG, WEIGHTS):
                (library / digest / name).write_bytes((place / name).read_bytes())
            self.stacks.append((AdapterChoice(place.name, digest),))
        self.library = library

    def pool(self, library: Path) -> AdapterPool:
        settings = AdapterSettings(device_bytes=int(self.nbytes * 3))
        device = torch.device("cpu")
        return AdapterPool(AdapterLibrary(library), self.model.targets, settings, device)

    def crowded_pool(self) -> AdapterPool:
        settings = AdapterSettings(device_bytes=int(self.nbytes * 1.5))
        return AdapterPool(
            AdapterLibrary(self.library), self.model.targets, settings, torch.device("cpu")
        )

    def resident(self, repeats: int) -> list[float]:
        pool = self.pool(self.library)
        wait_ready(pool, self.stacks[0])
        spent = [wait_ready(pool, self.stacks[0]) for _ in range(repeats)]
        pool.close()
        return spent

    def host(self, repeats: int) -> list[float]:
        """The two are used in turns, so each has to evict the other."""
        pool = self.crowded_pool()
        for stack in self.stacks:
            wait_ready(pool, stack)
        spent = [wait_ready(pool, self.stacks[turn % 2]) for turn in range(repeats)]
        pool.close()
        return spent

    def disk(self, repeats: int) -> list[float]:
        spent = []
        for _ in range(repeats):
            pool = self.pool(self.library)
            spent.append(wait_ready(pool, self.stacks[0]))
            pool.close()
        return spent

    def package(self, repeats: int) -> list[float]:
        document = {"name": "bench", "version": "1.0.0", "base_models": [], "schema_version": "2.0"}
        files_in = {name: self.made[0] / name for name in (CONFIG, WEIGHTS)}
        plain = pack(files_in, from_document(document), self.folder / "plain.expert")
        new_key(self.folder / "key")
        private = read_key(self.folder / "key")
        path = self.folder / "bench.expert"
        repack(plain, signed(plain, private), path)
        trust = TrustStore(self.folder / "trust.json")
        trust.trust(public_of(private), "bench")
        spent = []
        for turn in range(repeats):
            registry = AdapterRegistry(self.folder / f"registry{turn}")
            pool = self.pool(registry.library)
            begin = time.perf_counter()
            card = registry.install(path, trust=trust)
            installed = time.perf_counter() - begin
            spent.append(installed + wait_ready(pool, (AdapterChoice(card.name, card.digest),)))
            pool.close()
            registry.close()
        return spent


def switch_times(model: CausalLM, repeats: int = 20) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(model, Path(folder))
        cases: dict[str, Callable[[int], list[float]]] = {
            "resident": stage.resident,
            "host": stage.host,
            "disk": stage.disk,
            "package": stage.package,
        }
        print(f"an adapter of {stage.nbytes / 1e6:.1f} MB, rank {RANK} on all linear modules")
        found = {}
        for name, run in cases.items():
            found[name] = run(repeats)
            middle, worst = statistics.median(found[name]) * 1e3, max(found[name]) * 1e3
            goal = GOALS_MS[name]
            print(f"{name}: median {middle:.2f} ms, worst {worst:.2f} ms (goal {goal:.0f} ms)")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    switch_times(load_model(open_checkpoint(files.gguf("Q4_1"))), args.repeats)


if __name__ == "__main__":
    main()
