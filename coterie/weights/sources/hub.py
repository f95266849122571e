"""Models of the Hugging Face hub: `hf:ORG/REPO[/FILE.gguf][@REVISION]`.

huggingface_hub (imported when needed) tells which files a repository has and who may read them. The
files are fetched by our own download, so that progress, resume and layout are the same for every
source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import MissingDependency, WeightsError
from coterie.weights.formats.gguf import gguf_parts
from coterie.weights.sources.download import Progress, RemoteFile, download

_SPEC = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")
_WANTED = re.compile(
    r"[^/\\\0]+\.safetensors|model\.safetensors\.index\.json|config\.json|generation_config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.(jinja|json)"
    # how sentence-transformers makes one vector of many
    r"|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
)
# a module of sentence-transformers in a folder of its own, such as 1_Pooling
MODULE_FILE = re.compile(r"\d_[A-Za-z]{1,32}/(config\.json|model\.safetensors)")


@dataclass(frozen=True, slots=True)
class HubModel:
    repo: str
    # one GGUF file of the repository; None = the whole model
    file: str | None
    revision: str | None

    @property
    def source(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{file}{revision}"


@dataclass(frozen=True, slots=True)
class _HubFile:
    name: str
    remote: RemoteFile


def parse(spec: str) -> HubModel:
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise WeightsError(
            f"hf:{spec}: not a repository. Write hf:ORG/REPO, hf:ORG/REPO@REVISION or "
            "hf:ORG/REPO/FILE.gguf."
        )
    return HubModel(match[1], match[2], match[3])


def fetch(model: HubModel, target: Path, progress: Progress | None) -> dict[str, str]:
    """Fetches the model's files into the folder `target`; returns facts about them."""
    files, commit = _list(model)
    total = sum(file.remote.size_bytes or 0 for file in files)
    done = 0
    for file in files:
        name = file.name if MODULE_FILE.fullmatch(file.name) else Path(file.name).name
        path = target / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            download(file.remote, path, _shifted(progress, done, total))
        done += file.remote.size_bytes or 0
    return {"commit": commit}


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """One progress bar over all files."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total or None)


def _list(model: HubModel) -> tuple[list[_HubFile], str]:
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingDependency(
            f"{model.source} needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(
            model.repo, revision=model.revision, files_metadata=True
        )
    except GatedRepoError as error:
        raise WeightsError(
            f"{model.source}: its licence must be accepted on the hub first; then run "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except (RepositoryNotFoundError, HfHubHTTPError) as error:
        raise WeightsError(
            f"{model.source}: the hub has no such repository or revision, or it is private "
            f"({type(error).__name__}). Check the name, or set HF_TOKEN."
        ) from error
    except Exception as error:  # errors of its transport have no common base class over versions
        raise WeightsError(
            f"{model.source} is not on this machine and the hub cannot be reached "
            f"({type(error).__name__}). Connect, or give the path of a model."
        ) from error
    names = _choose(model, [item.rfilename for item in info.siblings or ()])
    headers = hub.utils.build_hf_headers(library_name="coterie")
    files = []
    for item in info.siblings or ():
        if item.rfilename in names:
            url = hub.hf_hub_url(model.repo, item.rfilename, revision=info.sha, endpoint=endpoint)
            files.append(_HubFile(item.rfilename, _remote(item, url, headers)))
    return files, str(info.sha)


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


def _choose(model: HubModel, names: Sequence[str]) -> set[str]:
    if model.file is not None:
        if model.file not in names:
            raise WeightsError(f"{model.source}: the repository has no such file. Check the name.")
        return _with_parts(model, model.file, names)
    top = {name for name in names if _WANTED.fullmatch(name)}
    if any(name.endswith(".safetensors") for name in top):
        return top | {name for name in names if MODULE_FILE.fullmatch(name)}
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1 or (ggufs and gguf_parts(ggufs[0]) == ggufs):
        return set(ggufs)
    if ggufs:
        raise WeightsError(
            f"{model.source}: holds {len(ggufs)} GGUF files; name one, for example "
            f"hf:{model.repo}/{ggufs[0]}."
        )
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    what = "pickle files only, which are refused" if pickled else "no safetensors or GGUF files"
    raise WeightsError(f"{model.source}: the repository holds {what}. Use another model.")
