"""core/config.py: defaults, files, overrides, and the sentences a wrong file is refused with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from coterie.core import config as settings
from coterie.core.config import Config, load, moe_settings, reference
from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.core.references import reference_faults
from coterie.core.settings import parse_bytes


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "coterie.toml"
    path.write_text(text)
    return path


def test_no_file_is_one_default_specialist_on_loopback() -> None:
    config = load(None)
    assert config == Config()
    assert config.server.host == "127.0.0.1" and config.server.port == 8000
    assert len(config.specialists) == 1 and config.specialists[0].model == ""


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [server]
        port = 9000
        max_body_bytes = "400KB"
        cors_origins = ["https://a.example"]
        [engine]
        kv_bytes = "2GiB"
        restart_backoff_s = 1
        [[specialists]]
        name = "small"
        block_size = 8
        [[specialists]]
        name = "large"
        model = "hf:org/model"
        """,
    )
    config = load(path, {"server.port": 9001, "specialists.1.dtype": "int8", "server.host": None})
    assert config.server.port == 9001 and config.server.host == "127.0.0.1"
    assert config.server.max_body_bytes == 400_000
    assert config.server.cors_origins == ("https://a.example",)
    assert config.engine.kv_bytes == 2 * 2**30
    assert config.engine.restart_backoff_s == 1.0
    assert [s.name for s in config.specialists] == ["small", "large"]
    assert config.specialists[1].dtype == "int8" and config.specialists[0].dtype == "auto"


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ("[server]\nprot = 1", "server.prot", "did you mean 'port'"),
        ("[serve]\nport = 1", "serve", "did you mean 'server'"),
        ("[[specialists]]\nblocksize = 8", "specialists.0.blocksize", "'block_size'"),
        ("[server]\nport = 70000", "server.port", "at most 65535"),
        ("[server]\nport = true", "server.port", "a whole number"),
        ("[server]\nport = 1.5", "server.port", "a whole number"),
        ('[server]\ninsecure = "yes"', "server.insecure", "true or false"),
        ("[server]\ndrain_s = nan", "server.drain_s", "a number"),
        ("[server]\ncors_origins = [1]", "server.cors_origins", "a list of texts"),
        ('[engine]\nkv_bytes = "2 apples"', "engine.kv_bytes", "400KB"),
        ("[[specialists]]\nblock_size = 12", "specialists.0.block_size", "8, 16, 32"),
        ('[[specialists]]\ndtype = "fp8"', "specialists.0.dtype", "int4"),
        (
            '[[specialists]]\n[specialists.experts]\nstrategy = "lru"',
            "specialists.0.experts",
            "specialists.0.experts is now specialists.0.moe",
        ),
        ('[[specialists]]\n[specialists.moe]\nreads = "x"', "specialists.0.moe.reads", "buffered"),
        ("server = 3", "server", "must be a table"),
        ("specialists = 3", "specialists", "[[specialists]]"),
        ("specialists = []", "specialists", "[[specialists]]"),
        ("[[specialists]]\nname='a'\n[[specialists]]\nname='a'", "specialists", "two specialists"),
        ("[[specialists]]\nname='auto'", "specialists", "router"),
        (
            "[engine]\nmax_sequences = 1024\nmax_step_tokens = 512",
            "engine.max_step_tokens",
            "stall",
        ),
        (
            "[engine]\nrestart_backoff_s = 5\nmax_restart_backoff_s = 1",
            "engine.max_restart_backoff_s",
            "below",
        ),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, param: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert caught.value.param == param
    assert words in caught.value.message


def test_broken_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(write(tmp_path, "[server"))
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "key", ["server", "specialists.x.name", "specialists.3.name", "specialists.0"]
)
def test_wrong_override(key: str) -> None:
    with pytest.raises(ConfigError):
        load(None, {key: "value"})


def test_an_override_by_its_earlier_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"specialists\.0\.experts is now specialists\.0\.moe"):
        load(None, {"specialists.0.experts.strategy": "lru"})
    assert load(None, {"specialists.0.moe.strategy": "lru"}).specialists[0].moe.strategy == "lru"


def test_moe_settings_are_checked_in_either_form() -> None:
    assert moe_settings({"strategy": "lru", "reads": None}) == MoeSettings("lru")
    assert moe_settings(MoeSettings("lru", device_budget="25%")).device_budget == "25%"
    for wrong in ({"reads": "twice"}, MoeSettings(reads="twice")):
        with pytest.raises(ConfigError, match="buffered") as refused:
            moe_settings(wrong)
        assert refused.value.param == "moe.reads"


def test_sizes() -> None:
    assert parse_bytes("2GB") == 2 * 10**9
    assert parse_bytes("1.5 kib") == 1536
    assert parse_bytes("17") == 17
    assert parse_bytes(17) == 17


def test_reference_lists_every_key_and_stays_small() -> None:
    text = reference()
    keys = [
        item.name
        for kind in (settings.ServerSettings, settings.EngineSettings, settings.SpecialistSettings)
        for item in fields(kind)
    ]
    assert len(keys) <= 54
    for key in keys:
        assert f"| `{key}` |" in text


ENCODER_FILE = """
[[specialists]]
kind = "encoder"
name = "minilm"
model = "./minilm"
[[specialists]]
name = "writer"
dtype = "int8"
[[specialists]]
kind = "encoder"
model = "static"
"""


def test_encoders_are_kept_apart_and_keep_their_order(tmp_path: Path) -> None:
    config = load(write(tmp_path, ENCODER_FILE), {"specialists.0.context": 512})
    assert [item.name for item in config.specialists] == ["writer"]
    assert config.specialists[0].context == 512
    assert [item.model for item in config.encoders] == ["./minilm", "static"]
    with pytest.raises(ConfigError, match="no encoder"):
        load(write(tmp_path, '[[specialists]]\nkind = "encoder"\nmodel = "static"\n'))
    with pytest.raises(ConfigError, match="one of generator, encoder"):
        load(write(tmp_path, '[[specialists]]\nkind = "image"\n'))


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('replicas = 2\nmodel = "static"', "specialists.enc.replicas"),
        ('fallback = "writer"\nmodel = "static"', "specialists.enc.fallback"),
        ('dtype = "int4"\nmodel = "static"', "specialists.enc.dtype"),
        ("", "specialists.enc.model"),
        ('model = "static"\n[specialists.remote]\nurl = "http://a"', "specialists.enc.remote"),
    ],
)
def test_keys_that_no_encoder_has(tmp_path: Path, text: str, param: str) -> None:
    both = '[[specialists]]\nname = "writer"\n[[specialists]]\nkind = "encoder"\nname = "enc"\n'
    config = load(write(tmp_path, both + text))
    faults = list(reference_faults(config, ["writer"], (), ["enc"]))
    assert [fault.param for fault in faults] == [param]


def test_limits_of_encoders_are_for_encoders(tmp_path: Path) -> None:
    text = '[[specialists]]\nname = "writer"\n[specialists.encoder]\nmax_inputs = 4\n'
    [fault] = reference_faults(load(write(tmp_path, text)), ["writer"], ())
    assert fault.param == "specialists.writer.encoder"
