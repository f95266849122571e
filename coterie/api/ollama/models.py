"""What Ollama's clients are told about the models: their list, one of them, and those in memory."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from coterie.api.dialect import ModelCard
from coterie.core.errors import NotFound
from coterie.models.text.fill import fill_marks

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.encoders.served import ServedEncoder
    from coterie.service.fleet import ServedSpecialist
    from coterie.service.pipeline import Pipeline

TAG = ":latest"
# what Ollama writes for a model that is never unloaded
_NEVER = "2318-09-18T00:00:00Z"
_ENCODER, _EMBEDDING = "bert", "embedding"
_PRECISIONS = {"fp32": "F32", "bf16": "BF16", "int8": "Q8", "int4": "Q4"}


def tagged(name: str) -> str:
    """The name with Ollama's default tag, as its lists write it."""
    return name if ":" in name else name + TAG


def known_name(pipeline: Pipeline, name: str, tenant: str) -> str:
    """The name without Ollama's default tag, unless a model has the name with it."""
    if name.endswith(TAG) and len(name) > len(TAG):
        try:
            pipeline.model(name, tenant)
        except NotFound:
            return name.removesuffix(TAG)
    return name


def list_fields(pipeline: Pipeline, tenant: str) -> dict[str, Any]:
    """/api/tags."""
    encoders = pipeline.encoders.served
    return {
        "models": [
            _listed_encoder(encoders[card.name])
            if card.name in encoders
            else _listed(pipeline, card)
            for card in pipeline.models(tenant)
        ]
    }


def running_fields(pipeline: Pipeline, tenant: str) -> dict[str, Any]:
    """/api/ps: every model is in memory. Those on other servers are in none of this machine's."""
    cards = [
        (card, pipeline.fleet.served[card.name])
        for card in pipeline.models(tenant)
        if card.name in pipeline.fleet.served
    ]
    return {
        "models": [
            _named(card)
            | {
                "size": served.info.weight_bytes + served.info.kv_bytes,
                "digest": _digest(card, served),
                "details": _details(card, served),
                "expires_at": _NEVER,
                "size_vram": _device_bytes(served),
                "context_length": card.max_model_len,
            }
            for card, served in cards
        ]
    }


def show_fields(pipeline: Pipeline, name: str, tenant: str) -> dict[str, Any]:
    """/api/show. The template is Jinja's, not Go's."""
    card = pipeline.model(name, tenant)
    if card.name in pipeline.encoders.served:
        return _shown_encoder(pipeline.encoders.served[card.name])
    served = pipeline.fleet.find(name)
    tokenizer, context = served.tokenizer, card.max_model_len
    family = _family(served)
    return {
        "modelfile": f"# A model of Coterie\nFROM {card.name}\nPARAMETER num_ctx {context}\n",
        "parameters": f"{'num_ctx':<30} {context}",
        "template": "" if tokenizer is None else tokenizer.chat_template or "",
        "details": _details(card, served),
        "model_info": {
            "general.architecture": family,
            "general.basename": card.name,
            f"{family}.context_length": context,
        },
        "capabilities": _capabilities(tokenizer),
        "modified_at": _moment(card.created),
    }


def _listed(pipeline: Pipeline, card: ModelCard) -> dict[str, Any]:
    served = pipeline.fleet.find(card.name)
    return _named(card) | {
        "modified_at": _moment(card.created),
        "size": served.info.weight_bytes,
        "digest": _digest(card, served),
        "details": _details(card, served),
        "capabilities": _capabilities(served.tokenizer),
    }


def _listed_encoder(served: ServedEncoder) -> dict[str, Any]:
    return {
        "name": tagged(served.name),
        "model": tagged(served.name),
        "modified_at": _moment(served.created),
        # of the weights; not known here
        "size": 0,
        "digest": hashlib.sha256(served.model.encode()).hexdigest(),
        "details": _encoder_details(served),
        "capabilities": [_EMBEDDING],
    }


def _shown_encoder(served: ServedEncoder) -> dict[str, Any]:
    return {
        "modelfile": f"# An encoder of Coterie\nFROM {served.name}\n",
        "parameters": "",
        "template": "",
        "details": _encoder_details(served),
        "model_info": {
            "general.architecture": _ENCODER,
            "general.basename": served.name,
            f"{_ENCODER}.context_length": served.context,
            f"{_ENCODER}.embedding_length": served.dim,
        },
        "capabilities": [_EMBEDDING],
        "modified_at": _moment(served.created),
    }


def _encoder_details(served: ServedEncoder) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": _ENCODER,
        "families": [_ENCODER],
        "parameter_size": "",
        "quantization_level": "F32",
        "context_length": served.context,
    }


def _named(card: ModelCard) -> dict[str, Any]:
    return {"name": tagged(card.name), "model": tagged(card.name)}


def _details(card: ModelCard, served: ServedSpecialist) -> dict[str, Any]:
    family, source = _family(served), served.model
    is_gguf = source.endswith(".gguf") or source.startswith("pypi:")
    return {
        "parent_model": card.parent or "",
        "format": "" if served.is_remote else "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        # not counted
        "parameter_size": "",
        "quantization_level": _PRECISIONS.get(served.info.dtype, served.info.dtype.upper()),
        "context_length": card.max_model_len,
    }


def _family(served: ServedSpecialist) -> str:
    """`LlamaForCausalLM` is the family `llama`."""
    return served.info.architecture.removesuffix("ForCausalLM").lower()


def _digest(card: ModelCard, served: ServedSpecialist) -> str:
    """Names the weights and what runs on them."""
    return hashlib.sha256(f"{served.info.fingerprint}\0{card.root}".encode()).hexdigest()


def _capabilities(tokenizer: Tokenizer | None) -> list[str]:
    """Tools work with every model: their calls are enforced by a grammar."""
    found = ["completion", "tools"]
    if tokenizer is not None and tokenizer.reasoning is not None:
        found.append("thinking")
    if tokenizer is not None and fill_marks(tokenizer) is not None:
        found.append("insert")
    return found


def _device_bytes(served: ServedSpecialist) -> int:
    info = served.info
    return info.weight_bytes + info.kv_bytes if info.device.startswith("cuda") else 0


def _moment(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
