"""The command line as a user meets it: real processes, exit codes, one-line errors."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.cli import tune
from coterie.core.errors import ConfigError
from tests.helpers.cpu_speed import slowness
from tests.helpers.models.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent


def coterie(
    *arguments: str, text: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coterie", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


class Command:
    """Commands in this process, from their arguments to what they print: torch is here already."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        from coterie.cli.main import main

        self._capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as ended:
            # argparse, after help and mistakes
            status = int(ended.code or 0)
        said = self._capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(tiny_checkpoint("llama"))


def test_help_is_instant() -> None:
    """Half a second of its own time, on a core of the usual speed."""
    times = []
    for _ in range(3):
        before = os.times()
        done = coterie("--help")
        after = os.times()
        used = (after.children_user, after.children_system)
        times.append(sum(used) - before.children_user - before.children_system)
        assert done.returncode == 0 and "coterie serve" in done.stdout
    assert min(times) < 0.5 * slowness()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from coterie.cli.main import build_parser; build_parser().format_help();"
        "print([n for n in ('torch','fastapi','pydantic','numpy','msgspec','rich','uvicorn')"
        " if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name", ["serve", "run", "chat", "pull", "doctor", "bench", "tune", "version"]
)
def test_every_command_explains_itself(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = command(name, "--help")
    assert done.returncode == 0
    assert name == "version" or "examples:" in done.stdout
    options = done.stdout.partition("examples:")[0]
    assert max(map(len, options.splitlines())) <= 60


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command's, and those of its own commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                yield from parsers(action.choices[name])


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    from coterie.cli.main import build_parser

    found = list(parsers(build_parser()))
    assert len(found) > 20
    for parser in found:
        text = parser.format_help()
        assert not [line for line in text.splitlines() if len(line) > 80], parser.prog
        if len(parser.prog.split()) < 3 and parser.prog != "coterie version":
            assert "examples:" in text, parser.prog


def test_krasis_flags_are_explained(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(command("run", "--help").stdout.split())
    for words in ("Krasis engine", "chunked", "persistent", "layer_grouped:N", "hot_cached_static"):
        assert words in text


def test_version() -> None:
    from coterie import __version__

    assert coterie("version").stdout == coterie("--version").stdout == f"coterie {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nothing"], 2, "invalid choice"),
        (["run"], 2, "--prompt"),
        (["run", "--prompt", "a", "--prompt-ids", "1"], 2, "not allowed with"),
        (["run", "--prompt-ids", "a"], 2, "token ids"),
        (["run", "--prompt", "a", "--max-tokens", "-1"], 2, "above 0"),
        (["run", "--prompt", "a", "--kv-bytes", "much"], 2, "2GB"),
        (["run", "/no/such/model", "--prompt", "a"], 1, "/no/such/model"),
        (["run", "--prompt-ids", "1", "--chat"], 2, "--chat needs --prompt"),
        (["serve", "--port", "99999"], 2, "not a port"),
        (["serve", "--host", "0.0.0.0"], 2, "--api-key-file"),
        (["serve", "--host", "::"], 2, "--insecure"),
        (["serve", "--api-key-file", "/no/such/keys"], 2, "/no/such/keys"),
        (["serve", "--config", "/no/such.toml"], 2, "/no/such.toml"),
        (["serve", "/no/such/model", "--port", "0"], 1, "/no/such/model"),
    ],
)
def test_mistakes_cost_one_line(
    arguments: list[str], status: int, words: str, command: Command
) -> None:
    done = (coterie if status == 1 else command)(*arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("coterie")


@pytest.mark.full
def test_a_broken_model_is_one_line(tmp_path: Path, command: Command) -> None:
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    asked = ["run", str(broken), "--prompt", "a"]
    for done in (command(*asked), coterie("serve", str(broken), "--port", "0")):
        assert done.returncode == 1
        assert str(broken) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_run_json(tiny: str, command: Command) -> None:
    asked = ["--max-tokens", "12", "--temperature", "0", "--json", "--ignore-eos"]
    by_text = json.loads(command("run", tiny, "--prompt", "hello", *asked).stdout)
    assert len(by_text["token_ids"]) == 12 and by_text["finish_reason"] == "length"
    assert by_text["usage"]["completion_tokens"] == 12
    assert by_text["timings"]["total_s"] > 0
    ids = ",".join(map(str, by_text["prompt_token_ids"]))
    by_ids = json.loads(command("run", tiny, "--prompt-ids", ids, *asked).stdout)
    assert by_ids["token_ids"] == by_text["token_ids"]
    streamed = coterie("run", tiny, "--prompt", "-", *asked[:4], "--ignore-eos", text="hello")
    assert streamed.stdout == by_text["text"] + "\n"


def test_run_with_the_chat_template(tiny: str, command: Command) -> None:
    asked = ["--prompt", "hello", "--max-tokens", "2", "--json"]
    plain = json.loads(command("run", tiny, "--raw", *asked).stdout)
    chat = json.loads(command("run", tiny, "--chat", *asked).stdout)
    assert chat["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    # a model that has a template is asked with it
    default = json.loads(command("run", tiny, *asked).stdout)
    assert default["prompt_token_ids"] == chat["prompt_token_ids"]


def test_run_tells_the_seed_it_drew(tiny: str, command: Command) -> None:
    asked = ["--prompt", "hello", "--max-tokens", "12", "--temperature", "1", "--json"]
    first = json.loads(command("run", tiny, *asked).stdout)
    again = json.loads(command("run", tiny, *asked, "--seed", str(first["seed"])).stdout)
    assert again["token_ids"] == first["token_ids"] and again["seed"] == first["seed"]


def test_run_without_a_chat_template(tiny: str, tmp_path: Path, command: Command) -> None:
    """Nothing but the text is there to go on with; a chat that was asked for is refused."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare)
    for beside in bare.glob("chat_template*"):
        beside.unlink()
    settings = bare / "tokenizer_config.json"
    facts = json.loads(settings.read_text())
    facts.pop("chat_template", None)
    settings.write_text(json.dumps(facts))
    asked = ["--prompt", "hello", "--max-tokens", "2", "--json"]
    plain = json.loads(command("run", str(bare), *asked).stdout)
    raw = json.loads(command("run", tiny, "--raw", *asked).stdout)
    assert plain["prompt_token_ids"] == raw["prompt_token_ids"]
    refused = command("run", str(bare), "--chat", *asked)
    assert refused.returncode == 2 and "no chat template" in refused.stderr


def test_the_default_model_knows_paris(default_model_path: Path) -> None:
    asked = ["--prompt", "What is the capital of France?", "--max-tokens", "12"]
    done = coterie("run", *asked, "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.full
def test_chat_through_a_pipe(tiny: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--max-tokens", "6", "--temperature", "0"]
    done = coterie("chat", tiny, *asked, text="hello\n/reset\nhello\nhello\n/odd\n/exit\nunread\n")
    assert done.returncode == 0, done.stderr
    answers = done.stdout
    assert "forgotten" in done.stderr and "commands:" in done.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    first = command("chat", tiny, *asked).stdout
    # after a reset the same words get the same answer; with a history they need not
    assert answers.startswith(first + first)


def test_doctor(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(coterie("doctor", "--json", COTERIE_HOME=str(tmp_path)).stdout)
    assert report["cpu"]["cores"] >= 1 and report["memory"]["total_bytes"] > 0
    assert report["torch"]["version"] and report["home"]["path"] == str(tmp_path)
    assert any(fault["mend"] == "coterie pull" for fault in report["missing"])
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("COTERIE_HOME", "/short")
    shown = command("doctor").stdout
    assert max(map(len, shown.splitlines())) <= 60
    assert "kernels" in shown and "compiler" in shown
    assert "will use" in shown and "threads" in shown
    assert report["used"]["max_kv_bytes"] > 0 and report["used"]["dtype"] is None
    assert list(tmp_path.iterdir()) == []


def test_tune_needs_a_gpu(command: Command) -> None:
    done = command("tune", "--device", "cpu")
    assert done.returncode == 2 and "only CUDA devices are tuned" in done.stderr
    if not torch.cuda.is_available():
        done = command("tune")
        assert done.returncode == 2 and "there is no CUDA device here" in done.stderr


def test_tune_takes_the_models_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "coterie.toml"
    file.write_text("""
        [[specialists]]
        name = "a"
        [[specialists]]
        name = "b"
        [[specialists]]
        name = "c"
        dtype = "int8"
        [[specialists]]
        name = "far"
        [specialists.remote]
        url = "http://localhost:1/v1"
        model = "m"
    """)
    args = argparse.Namespace(models=[], dtype="auto", config=file)
    assert tune.wanted(args) == [(None, "auto"), (None, "int8")]
    args.models = ["./model"]
    with pytest.raises(ConfigError):
        tune.wanted(args)
    args.config = None
    assert tune.wanted(args) == [("./model", "auto")]


def test_doctor_finds_versions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every package has is not read to tell the versions of a few."""
    monkeypatch.setattr("importlib.metadata.packages_distributions", None)
    from coterie.cli.doctor import PACKAGES
    from coterie.cli.machine import package_version

    for module, (package, _, _) in PACKAGES.items():
        assert package_version(module, package) == importlib.metadata.version(package)


def test_doctor_finds_a_package_by_another_name() -> None:
    from coterie.cli.machine import package_version

    assert package_version("zmq", "no-such-package") == importlib.metadata.version("pyzmq")
    assert package_version("no_such_module", "pyzmq") is None


def test_doctor_names_keys_that_all_can_read(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path))
    keys, config = tmp_path / "keys.txt", tmp_path / "coterie.toml"
    keys.write_text("some-key\n")
    config.write_text(f'[server]\napi_key_file = "{keys}"\n')

    def mends(mode: int) -> list[str]:
        keys.chmod(mode)
        done = command("doctor", "--json", "--config", str(config))
        return [fault["mend"] for fault in json.loads(done.stdout)["missing"]]

    assert f"chmod 600 {keys}" in mends(0o644)
    assert f"chmod 600 {keys}" not in mends(0o640)


@pytest.mark.full
def test_bench(tiny: str) -> None:
    done = coterie("bench", tiny, "--decode", "8", "--prefill", "32", "--repeat", "1", "--json")
    report = json.loads(done.stdout)
    assert report["bandwidth_bytes_s"] > 1e9
    assert [row["what"] for row in report["results"]] == [
        "decode, 1 stream",
        "prefill of 32",
        "8 streams, with prompts of 128",
    ]
    assert all(row["tokens_s"] > 0 for row in report["results"])


def test_an_empty_list(tmp_path: Path) -> None:
    assert "no models" in coterie("list", COTERIE_HOME=str(tmp_path)).stdout


BARE = """
import sys

class Absent:
    NAMES = {"typer", "rich", "fastapi", "pydantic", "starlette", "uvicorn", "uvloop", "httptools",
             "msgspec", "zmq", "huggingface_hub", "platformdirs", "prometheus_client", "psutil",
             "transformers", "gguf", "httpx"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Absent())
from coterie.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_run_and_doctor_on_a_bare_machine(tiny: str) -> None:
    """torch, numpy, safetensors, tokenizers and jinja2 are enough."""

    def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BARE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)

    done = bare("run", tiny, "--prompt", "hello", "--max-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
    report = bare("doctor")
    assert report.returncode == 0, report.stderr
    assert "pip install fastapi" in report.stdout
    serve = bare("serve", tiny, "--port", "0")
    assert serve.returncode == 1 and "pip install fastapi" in serve.stderr


def until_running(url: str) -> None:
    give_up_at = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
            running = re.findall(
                r"^vllm:num_requests_running{.*} (\S+)$", reply.read().decode(), re.M
            )
        if sum(map(float, running)):
            return
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


@pytest.mark.full
def test_a_second_interrupt_stops_at_once(tiny: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "coterie", "serve", tiny, "--port", "0", "--name", "tiny"],
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=ROOT,
        )
    try:
        assert server.stdout is not None
        shown = ""
        while "try it" not in shown:
            line = server.stdout.readline()
            assert line, log.read_text()
            shown += line
        url = next(w for w in shown.split() if w.startswith("http"))
        example = server.stdout.readline().split(maxsplit=1)
        assert example[0] == "curl" and f"{url}/v1/infer " in example[1]
        body = json.dumps(
            {"model": "tiny", "prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 32}
        )
        asking = subprocess.Popen(
            [
                "curl",
                "-s",
                f"{url}/v1/completions",
                "-H",
                "content-type: application/json",
                "-d",
                body,
            ],
            stdout=subprocess.DEVNULL,
        )
        until_running(url)
        server.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.poll() is None, "it did not let the request end"
        started = time.monotonic()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert time.monotonic() - started < 15
        asking.wait(60)
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
