"""Models of the Hugging Face hub: `hf:ORG/REPO[/FILE.gguf | :QUANT][@REVISION]`.

huggingface_hub (imported when needed) tells which files a repository has and who may read them. The
files are fetched by our own download, so that progress, resume and layout are the same for every
source.
"""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coterie.core.errors import MissingDependency, WeightsError
from coterie.weights.formats.gguf import gguf_parts
from coterie.weights.sources.download import (
    Progress,
    RefusedDownload,
    RemoteFile,
    download,
    open_url,
)
from coterie.weights.sources.quantisations import GgufChoice, choices, named_choice

_SPEC = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?P<file>[\w./-]+\.gguf)|:(?P<quant>[\w-]+))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
_WANTED = re.compile(
    r"[^/\\\0]+\.safetensors|model\.safetensors\.index\.json|config\.json|generation_config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.(jinja|json)"
    # how sentence-transformers makes one vector of many
    r"|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
)
# a module of sentence-transformers in a folder of its own, such as 1_Pooling
MODULE_FILE = re.compile(r"\d_[A-Za-z]{1,32}/(config\.json|model\.safetensors)")

_TIMEOUT_S = 30.0
_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class HubModel:
    repo: str
    # one GGUF file of the repository; None = the whole model, or what `quant` names
    file: str | None
    revision: str | None
    # the quantisation whose GGUF file is wanted, such as Q4_K_M
    quant: str | None = None

    @property
    def source(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{part}{revision}"

    @property
    def folder(self) -> str:
        """The name of the folder that holds it."""
        return f"hf--{re.sub('[/@]', '--', self.source.removeprefix('hf:')).replace(':', '+')}"


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    remote: RemoteFile


@dataclass(frozen=True, slots=True)
class HubListing:
    """The files to fetch for a model. Of a repository with several GGUF files and no quantisation
    in its name, `choices` are what there is to choose from, and `files` is empty until `chosen`."""

    model: HubModel
    commit: str
    files: tuple[HubFile, ...]
    choices: tuple[GgufChoice, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.remote.size_bytes or 0 for file in self.files)


def parse(spec: str) -> HubModel:
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise WeightsError(
            f"hf:{spec}: not a repository. Write hf:ORG/REPO, hf:ORG/REPO:Q4_K_M, "
            "hf:ORG/REPO/FILE.gguf, and @REVISION behind any of them."
        )
    quant = match["quant"]
    return HubModel(match["repo"], match["file"], match["revision"], quant and quant.upper())


def repository(model: HubModel) -> HubModel:
    """The whole repository that the model is of, at its newest revision."""
    return HubModel(model.repo, None, None)


def fetch(listing: HubListing, target: Path, progress: Progress | None) -> None:
    """Fetches the listed files into the folder `target`."""
    total, done = listing.nbytes, 0
    for file in listing.files:
        path = target / _local_name(file)
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            try:
                download(file.remote, path, _shifted(progress, done, total))
            except RefusedDownload as error:
                raise _gated(listing.model) from error
        done += file.remote.size_bytes or 0


def missing_bytes(listing: HubListing, target: Path) -> int:
    """What is still to be fetched into `target`."""
    here = 0
    for file in listing.files:
        path = target / _local_name(file)
        part = path.with_name(f"{path.name}.part")
        found = path if path.exists() else part
        here += found.stat().st_size if found.exists() else 0
    return max(0, listing.nbytes - here)


def _local_name(file: HubFile) -> str:
    return file.name if MODULE_FILE.fullmatch(file.name) else Path(file.name).name


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """One progress bar over all files."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total or None)


def list_files(model: HubModel, timeout_s: float = _TIMEOUT_S) -> HubListing:
    """Asks the hub for the repository's files. Fetches none of them."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise MissingDependency(
            f"{model.source} needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=timeout_s
        )
    except Exception as error:  # errors of its transport have no common base class over versions
        raise _unanswered(model, error) from error
    headers = hub.utils.build_hf_headers(library_name="coterie")
    files = {
        item.rfilename: HubFile(
            item.rfilename,
            _remote(
                item,
                hub.hf_hub_url(model.repo, item.rfilename, revision=info.sha, endpoint=endpoint),
                headers,
            ),
        )
        for item in info.siblings or ()
    }
    return _choose(model, str(info.sha), files)


def has_file(model: HubModel, file: str, timeout_s: float) -> bool:
    """Whether the hub can be reached and gives the file's first byte to anybody. Does not import
    huggingface_hub, which takes as long as the answer."""
    endpoint = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    url = f"{endpoint}/{model.repo}/resolve/{model.revision or 'main'}/{quote(file)}"
    try:
        with open_url(url, {"Range": "bytes=0-0"}, timeout_s) as response:
            return bool(response.status in (200, 206))
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (OSError, http.client.HTTPException):
        return False


def _unanswered(model: HubModel, error: Exception) -> WeightsError:
    """What an error of the hub means, and what to do."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, GatedRepoError):
        return _gated(model)
    if isinstance(error, OfflineModeIsEnabled):
        return WeightsError(
            f"{model.source} is not on this machine and HF_HUB_OFFLINE forbids to ask the hub. "
            "Unset it, or give the path of a model."
        )
    status = _status(error) if isinstance(error, HfHubHTTPError) else 0
    if status == 429 or status >= 500:
        return WeightsError(f"{model.source}: the hub answered {status}. Try again later.")
    if status:
        return WeightsError(
            f"{model.source}: the hub has no such repository or revision, or it is private "
            f"({status}). Check the name, or set HF_TOKEN."
        )
    return WeightsError(
        f"{model.source} is not on this machine and the hub cannot be reached "
        f"({type(error).__name__}). Connect, set HF_ENDPOINT to a mirror, or give the path of a "
        "model."
    )


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _gated(model: HubModel) -> WeightsError:
    return WeightsError(
        f"{model.source}: its licence must be accepted on the hub first; then run "
        "`hf auth login` or set HF_TOKEN."
    )


def _remote(item: Any, url: str, headers: dict[str, str]) -> RemoteFile:
    # only large files have a sha256; small ones are git blobs
    sha256 = item.lfs.sha256 if item.lfs else None
    return RemoteFile(url, sha256, item.size, headers)


def _with_parts(model: HubModel, file: str, names: Sequence[str]) -> set[str]:
    """The file, and the others of a split model."""
    folder, slash, name = file.rpartition("/")
    wanted = {f"{folder}{slash}{part}" for part in gguf_parts(name) or [name]}
    missing = sorted(wanted - set(names))
    if missing:
        raise WeightsError(f"{model.source}: the repository lacks its part {missing[0]}.")
    return wanted


def _choose(model: HubModel, commit: str, files: dict[str, HubFile]) -> HubListing:
    names = list(files)

    def listing(wanted: set[str]) -> HubListing:
        return HubListing(model, commit, tuple(files[name] for name in names if name in wanted))

    if model.file is not None:
        if model.file not in names:
            raise WeightsError(f"{model.source}: the repository has no such file. Check the name.")
        return listing(_with_parts(model, model.file, names))
    top = {name for name in names if _WANTED.fullmatch(name)}
    if model.quant is None and any(name.endswith(".safetensors") for name in top):
        return listing(top | {name for name in names if MODULE_FILE.fullmatch(name)})
    found = choices({name: file.remote.size_bytes or 0 for name, file in files.items()})
    if model.quant is not None:
        return listing(set(named_choice(model.source, model.quant, found).files))
    if len(found) == 1:
        return listing(_with_parts(model, found[0].files[0], names))
    if found:
        every = tuple(files[name] for choice in found for name in choice.files)
        return HubListing(model, commit, every, found)
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    what = "pickle files only, which are refused" if pickled else "no safetensors or GGUF files"
    raise WeightsError(f"{model.source}: the repository holds {what}. Use another model.")


def chosen(listing: HubListing, choice: GgufChoice) -> HubListing:
    """The listing of one of its choices, which the model's source then names."""
    files = tuple(file for file in listing.files if file.name in choice.files)
    model = replace(listing.model, quant=choice.label or None)
    if not choice.label:
        model = replace(listing.model, file=choice.files[0])
    return HubListing(model, listing.commit, files)
