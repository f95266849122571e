"""Models of the hub: which quantisation is taken, and downloads that break, lie or are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.core.errors import WeightsError
from coterie.weights.room import ModelRoom, model_room
from coterie.weights.sources.quantisations import GgufChoice, best_fitting, choices
from coterie.weights.sources.source import list_cached, resolve
from tests.helpers.hub_site import TOKEN, HubRepo, HubSite, reachable_hub

MODEL = bytes(range(256)) * 4096  # 1 MiB
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Iterator[HubSite]:
    with reachable_hub(monkeypatch, private_home) as site:
        yield site


def gguf(*labels: str) -> dict[str, bytes]:
    """Files of a model, each a little smaller than the one before."""
    return {f"Tiny-{label}.gguf": MODEL[: len(MODEL) - i] for i, label in enumerate(labels)}


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        (":Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        (":q8_0", ["Tiny-Q8_0.gguf"]),
        # the file in one piece, of two forms of the same
        (":Q6_K", ["Tiny-Q6_K.gguf"]),
        (":BF16", ["Tiny-BF16-00001-of-00002.gguf", "Tiny-BF16-00002-of-00002.gguf"]),
        # the only one of that kind is a publisher's mix
        (":Q5_K_M", ["Tiny-UD-Q5_K_M.gguf"]),
        ("/deep/Tiny-Q2_K.gguf", ["Tiny-Q2_K.gguf"]),
        (":Q4_K_M@main", ["Tiny-Q4_K_M.gguf"]),
    ],
)
def test_a_quantisation_is_one_model(hub: HubSite, spec: str, files: list[str]) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(
        gguf("Q8_0", "Q6_K", "UD-Q5_K_M", "Q4_K_M", "IQ4_XS")
        | {"deep/Tiny-Q2_K.gguf": MODEL, "mmproj-Q4_K_M.gguf": MODEL, "README.md": b"words"}
        | {f"Tiny-Q6_K-0000{part}-of-00002.gguf": MODEL for part in (1, 2)}
        | {f"BF16/Tiny-BF16-0000{part}-of-00002.gguf": MODEL for part in (1, 2)}
    )
    path = resolve(f"hf:org/Tiny-GGUF{spec}")
    assert path.name == files[0]
    assert sorted(item.name for item in path.parent.glob("*.gguf")) == files
    hub.asked.clear()
    assert resolve(f"hf:org/Tiny-GGUF{spec.upper() if spec[1:] == 'q8_0' else spec}") == path
    assert hub.asked == [], "a model that is here needs no network"
    [here] = list_cached()
    assert here.source == f"hf:org/Tiny-GGUF{spec.replace('q8_0', 'Q8_0')}"


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        ("Q3_K_M", "no Q3_K_M; it has Q8_0, Q4_K_M, IQ4_XS"),
        ("IQ4_XS", "IQ4_XS is not a type that is read. Nothing was fetched. Choose one of Q8_0"),
    ],
)
def test_a_quantisation_that_cannot_be_had(
    hub: HubSite, private_home: Path, quant: str, words: str
) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(gguf("Q8_0", "Q4_K_M", "IQ4_XS"))
    with pytest.raises(WeightsError, match=words):
        resolve(f"hf:org/Tiny-GGUF:{quant}")
    assert hub.ranges() == [] and list_cached() == []


def test_two_models_of_one_quantisation_are_named(hub: HubSite) -> None:
    hub.repos["org/Two"] = HubRepo({"a-Q8_0.gguf": MODEL, "b-Q8_0.gguf": MODEL})
    with pytest.raises(WeightsError, match="2 files are Q8_0"):
        resolve("hf:org/Two:Q8_0")


def test_without_a_quantisation_the_best_that_fits_is_taken_and_told(hub: HubSite) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(gguf("BF16", "Q8_0", "Q4_K_M", "Q2_K"))
    said: list[str] = []
    path = resolve("hf:org/Tiny-GGUF", say=said.append)
    assert path.name == "Tiny-Q8_0.gguf"
    [line] = said
    assert "Q8_0" in line and "the largest of 2 that fits" in line and "free" in line
    # the same model under both names, and without the network under the short one
    hub.asked.clear()
    assert resolve("hf:org/Tiny-GGUF") == resolve("hf:org/Tiny-GGUF:Q8_0") == path
    assert hub.asked == [] and len(list_cached()) == 1


def test_what_fits_is_the_largest_quantised_file_that_leaves_room() -> None:
    found = choices(
        {
            "m-F16.gguf": 16_000,
            "m-Q8_0.gguf": 8_000,
            "m-Q6_K.gguf": 6_000,
            "m-UD-Q4_K_XL.gguf": 5_500,
            "m-Q4_K_M.gguf": 5_000,
            "m-IQ2_XS.gguf": 2_000,
        }
    )

    def best(free_bytes: int, found: tuple[GgufChoice, ...] = found) -> tuple[str, str]:
        choice, line = best_fitting("hf:m", found, ModelRoom(free_bytes, is_gpu=False))
        return choice.label, line

    assert best(10**6)[0] == "Q8_0"
    assert best(10_000)[0] == "Q6_K", "a quarter is left for keys and values"
    label, line = best(1000)
    assert label == "Q4_K_M" and "none fits" in line
    assert best(10**6, tuple(item for item in found if item.label == "F16"))[0] == "F16"
    with pytest.raises(WeightsError, match="none of which is read"):
        best(10**6, tuple(item for item in found if item.label == "IQ2_XS"))


def test_the_room_of_this_machine_is_known() -> None:
    room = model_room("cpu")
    assert not room.is_gpu and 0 < room.weight_bytes < room.free_bytes


def test_a_broken_connection_is_continued(hub: HubSite) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(gguf("Q8_0"))
    hub.cuts = [300_000, 700_000]
    assert resolve("hf:org/Tiny-GGUF").read_bytes() == MODEL
    assert hub.ranges() == [None, "bytes=300000-", "bytes=700000-"]


def test_files_of_two_commits_are_never_mixed(hub: HubSite, private_home: Path) -> None:
    """A download breaks off behind the first file; then somebody publishes the model anew."""
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    hub.repos["org/Shards"] = HubRepo(dict.fromkeys(names, MODEL))
    hub.cuts = [len(MODEL), *[1000] * 5]
    with pytest.raises(WeightsError, match="what has arrived is kept"):
        resolve("hf:org/Shards")
    assert len(list(private_home.rglob(names[0]))) == 1
    newer = MODEL[::-1]
    hub.repos["org/Shards"] = HubRepo(dict.fromkeys(names, newer), commit="d" * 40)
    folder = resolve("hf:org/Shards")
    assert [(folder / name).read_bytes() == newer for name in names] == [True, True]
    assert not list(private_home.rglob("*.part"))


def _pull(spec: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "coterie", "pull", spec],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=dict(os.environ),
    )


def test_a_pull_that_was_killed_is_continued_by_the_next(hub: HubSite, private_home: Path) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(gguf("Q8_0"))
    hub.halfway = threading.Event()
    first = _pull("hf:org/Tiny-GGUF:Q8_0")
    try:
        _wait_until(lambda: any(_parts(private_home)), first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    [kept] = _parts(private_home)
    hub.halfway.set()
    hub.halfway = None
    second = _pull("hf:org/Tiny-GGUF:Q8_0")
    out, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert Path(out.strip()).read_bytes() == MODEL
    assert hub.ranges() == [None, f"bytes={kept}-"]
    assert "100%" in said and "Traceback" not in said


def _parts(home: Path) -> list[int]:
    """The bytes of what has arrived of files that are not complete."""
    sizes = [path.stat().st_size for path in home.rglob("*.part")]
    return [size for size in sizes if size]


def _wait_until(condition: object, process: subprocess.Popen[str]) -> None:
    assert callable(condition)
    limit = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)


def test_a_corrupted_download_is_thrown_away(hub: HubSite, private_home: Path) -> None:
    hub.repos["org/Tiny-GGUF"] = HubRepo(gguf("Q8_0"), corrupted={"Tiny-Q8_0.gguf"})
    with pytest.raises(WeightsError, match="does not have the expected sha256"):
        resolve("hf:org/Tiny-GGUF")
    assert list_cached() == [] and _parts(private_home) == []
    hub.repos["org/Tiny-GGUF"].corrupted.clear()
    assert resolve("hf:org/Tiny-GGUF").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("repo", "spec", "words"),
    [
        (None, "hf:org/Nothing", r"no such repository or revision, or it is private \(401\)"),
        (HubRepo(gguf("Q8_0")), "hf:org/Tiny@v9", r"no such repository or revision.*\(404\)"),
        (HubRepo(gguf("Q8_0")), "hf:org/Tiny/Other.gguf", "no such file"),
        (HubRepo({}, listing_error=(403, "GatedRepo")), "hf:org/Tiny", "licence must be accepted"),
        (HubRepo(gguf("Q8_0"), file_error=(403, "GatedRepo")), "hf:org/Tiny", "licence must be"),
        (HubRepo(gguf("Q8_0"), file_error=(401, "GatedRepo")), "hf:org/Tiny", "set HF_TOKEN"),
        (HubRepo({}, listing_error=(503, "")), "hf:org/Tiny", "answered 503. Try again later"),
        (HubRepo({"a.bin": b""}), "hf:org/Tiny", "pickle files only"),
    ],
)
def test_what_is_refused_says_what_to_do(
    hub: HubSite, private_home: Path, repo: HubRepo | None, spec: str, words: str
) -> None:
    if repo is not None:
        hub.repos["org/Tiny"] = repo
    with pytest.raises(WeightsError, match=words) as caught:
        resolve(spec)
    assert "\n" not in caught.value.message and spec in caught.value.message
    assert hub.ranges() == [] and list_cached() == []


def test_a_token_opens_what_is_gated(hub: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/Tiny"] = HubRepo(
        gguf("Q8_0"), listing_error=(403, "GatedRepo"), file_error=(403, "GatedRepo")
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve("hf:org/Tiny").read_bytes() == MODEL


def test_a_hub_that_cannot_be_reached(hub: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"the hub cannot be reached .* set HF_ENDPOINT"):
        resolve("hf:org/Tiny:Q4_K_M")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):
        resolve("qwen3:4b")


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(hub: HubSite) -> None:
    files = gguf("Q8_0")
    hub.repos["org/Huge"] = HubRepo(files, stated_bytes=dict.fromkeys(files, 10**18))
    with pytest.raises(WeightsError, match=r"needs 1000000000.0 GB.*coterie rm.*COTERIE_HOME"):
        resolve("hf:org/Huge:Q8_0")
    assert hub.ranges() == []
