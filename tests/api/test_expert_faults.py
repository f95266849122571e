"""Experts that cannot be loaded: refused when they are installed, left out when they break later.

Against a real server with a worker process, and room for one expert as it lies beside the model.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.app_with_experts import (
    ADMIN,
    MODEL,
    RELATED,
    SQL,
    UNRELATED,
    Packer,
    adapter,
    infer,
)
from tests.helpers.serving.server_process import Served, own_home

NARROW = {"dtype": "bfloat16"}
FILE = "adapter_model.safetensors"


class House:
    def __init__(self, folder: Path) -> None:
        self.home = own_home(folder / "home")
        (folder / "admins.txt").write_text(f"{ADMIN}\n")
        packer = self.packer = Packer(folder)
        packer.trust(self.home / "state" / "trust.json")
        nbytes = (adapter(seed=1, **NARROW) / FILE).stat().st_size
        self.served = Served(
            str(MODEL),
            *("--name", "tiny", "--admin-key-file", str(folder / "admins.txt"), "--allow-unsigned"),
            *("--adapter-bytes", str(nbytes * 5 // 4)),
            COTERIE_HOME=str(self.home),
        )
        self.package = packer.package(
            "sql-writer", seed=1, description="Writes SQL queries", routing=SQL, options=NARROW
        )
        self.install()

    def install(self) -> None:
        reply = self.served.post(
            "/v1/experts",
            self.package,
            authorization=f"Bearer {ADMIN}",
            content_type="application/octet-stream",
        )
        assert reply.status == 201, reply.body

    def load(self, name: str, path: Path) -> Any:
        body = {"lora_name": name, "lora_path": str(path)}
        return self.served.post("/v1/load_lora_adapter", body, authorization=f"Bearer {ADMIN}")

    def routed(self) -> Any:
        return infer(self.served, RELATED, max_tokens=2)

    def routes_to(self, *names: str) -> None:
        """An index of what is installed is made in the background."""
        give_up_at = time.monotonic() + 60
        while (answer := self.routed())["experts_used"] != list(names):
            assert time.monotonic() < give_up_at, answer
            time.sleep(0.05)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("faults"))
    yield made
    made.served.stop()


def changed(**config: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    return change


def without_one(path: Path) -> None:
    tensors = load_file(path / FILE)
    del tensors[next(name for name in tensors if "1.mlp.up_proj.lora_B" in name)]
    save_file(tensors, path / FILE)


def wider(path: Path) -> None:
    tensors = load_file(path / FILE)
    name = next(name for name in tensors if "1.mlp.up_proj.lora_A" in name)
    tensors[name] = tensors[name].repeat(1, 2)
    save_file(tensors, path / FILE)


def with_value(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    """The last number of one tensor."""

    def change(path: Path) -> None:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / FILE).items()}
        name = next(name for name in tensors if "1.mlp.up_proj.lora_B" in name)
        tensors[name][-1, -1] = value
        save_file(tensors, path / FILE)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_value(math.nan, torch.bfloat16), "layers.1.mlp.up_proj.lora_B"),
        (with_value(-math.inf, torch.bfloat16), "NaN or infinity"),
        # in fp32 it takes twice as much beside the model
        (lambda _: None, "adapters.device_bytes"),
        (changed(r=1024), "lora_A"),
        (changed(use_dora=True), "lora_magnitude_vector"),
        (changed(modules_to_save=["lm_head"]), "modules_to_save"),
        (changed(peft_type="LOHA"), "LOHA"),
        (without_one, "layers.1.mlp.up_proj: lacks lora_B"),
        (wider, "layers.1.mlp.up_proj.lora_A"),
    ],
)
def test_what_cannot_be_loaded_is_not_installed(
    house: House, tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapter(seed=2), broken)
    change(broken)
    reply = house.load("broken", broken)
    assert reply.status == 400 and named in reply.json["error"]["message"], reply.body
    assert "broken" not in [row["id"] for row in house.served.get("/v1/models").json["data"]]


def test_an_adapter_of_another_base_is_not_installed(house: House) -> None:
    other = tiny_checkpoint("llama", hidden_size=96, intermediate_size=192)
    for kind, named in (("lora", ".lora_"), ("ia3", "ia3_l"), ("soft_prompt", "prompt_embeddings")):
        reply = house.load("foreign", make_adapter(other, kind, 7))
        assert reply.status == 400 and named in reply.json["error"]["message"], reply.body


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "soft_prompt"])
def test_what_can_be_loaded_is(house: House, kind: str) -> None:
    smaller = {"r": 1} if kind in ("lora", "dora") else {}
    assert house.load(f"good-{kind}", adapter(kind, 3, **smaller)).status == 200
    body = {"model": f"good-{kind}", "prompt": "x", "max_tokens": 1}
    reply = house.served.post("/v1/completions", body)
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_a_package_is_looked_at(
    house: House, tmp_path: Path, dtype: torch.dtype
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(adapter(seed=2, r=1), broken)
    for value in (math.nan, math.inf):
        with_value(value, dtype)(broken)
        reply = house.load("broken", broken)
        assert reply.status == 400 and "NaN or inf" in reply.json["error"]["message"], reply.body
    with_value(torch.finfo(dtype).max, dtype)(broken)
    assert house.load(f"largest-{dtype}".replace(".", "-"), broken).status == 200


def test_a_package_larger_than_the_room_for_adapters_is_not_installed(house: House) -> None:
    """Alone it could never run, whoever asks."""
    package = house.packer.package("large", seed=4)
    reply = house.served.post(
        "/v1/experts",
        package,
        authorization=f"Bearer {ADMIN}",
        content_type="application/octet-stream",
    )
    assert reply.status == 400, reply.body
    assert "there is room for" in reply.json["error"]["message"]


def test_an_expert_takes_what_it_takes(house: House) -> None:
    """In bf16, as the engine keeps it: in fp32 there would be no room for it."""
    house.routes_to("sql-writer")
    answer = house.routed()
    assert answer["degraded"] == []


@pytest.mark.full
def test_a_damaged_expert_is_left_out_until_it_is_installed_again(house: House) -> None:
    house.routes_to("sql-writer")
    folder = next(
        path
        for path in (house.home / "state" / "experts" / "library").iterdir()
        if (path / FILE).read_bytes() == (adapter(seed=1, **NARROW) / FILE).read_bytes()
    )
    # pushed out of the device and of RAM: the worker reads it anew
    house.served.stop()
    house.served = Served(
        str(MODEL), "--name", "tiny", "--admin-key-file", str(house.home.parent / "admins.txt"),
        COTERIE_HOME=str(house.home),
    )  # fmt: skip
    give_up_at = time.monotonic() + 60
    while infer(house.served, UNRELATED, max_tokens=1)["degraded"]:
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    raw = bytearray((folder / FILE).read_bytes())
    raw[-1] ^= 1
    (folder / FILE).unlink()
    (folder / FILE).write_bytes(raw)

    answer = house.routed()
    assert answer["experts_used"] == [] and answer["tokens_generated"] == 2
    assert len(answer["degraded"]) == 1 and "sql-writer" in answer["degraded"][0]
    assert "damaged" in answer["degraded"][0]
    # told once, and out of routing from then on
    assert house.routed()["degraded"] == []
    assert house.served.log().count("expert_damaged") == 1
    (facts,) = house.served.get("/health").json["specialists"].values()
    assert facts["damaged_experts"] == ["sql-writer@1.0.0"] and facts["ready"]
    assert house.served.metric("coterie_damaged_experts") == 1
    assert house.served.metric("coterie_recoveries_total") >= 1
    named = house.served.post(
        "/v1/chat/completions",
        {"model": "sql-writer", "messages": [{"role": "user", "content": "x"}]},
    )
    assert named.status == 503 and "sql-writer" in named.json["error"]["message"]
    assert str(house.home) not in named.body.decode()

    house.install()
    house.routes_to("sql-writer")
    assert house.served.metric("coterie_damaged_experts") == 0
    assert "damaged_experts" not in house.served.get("/health").body.decode()
