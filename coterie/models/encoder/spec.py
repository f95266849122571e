"""Describes an encoder from the files of its directory, without reading a tensor.

`config.json` names the network. The files of sentence-transformers say how the vectors of the
tokens become one vector: `modules.json`, `1_Pooling/config.json` and `sentence_bert_config.json`.
A directory without them gets the mean of its tokens, with unit length. No torch here: the gateway
reads these files too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.weights.files import read_json, read_json_list

# how tokens become one vector, in the order in which several are joined
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "last")
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_CLASSIFIER = "ForSequenceClassification"
# names of prompts of sentence-transformers for the two sides of a search
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """What distinguishes a `model_type`: where its configuration and its tensors are."""

    # the prefix of its tensors in a checkpoint with a head
    prefix: str
    # positions count from the padding id plus one
    shifted: bool = False
    # names of its settings where they differ from BERT's
    keys: Mapping[str, str] = field(default_factory=dict)


_BERT_KEYS = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "activation": "hidden_act",
}
_DISTIL_KEYS = {
    "hidden": "dim",
    "inner": "hidden_dim",
    "heads": "n_heads",
    "layers": "n_layers",
    "activation": "activation",
}
FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily("bert.", keys=_BERT_KEYS),
    "roberta": EncoderFamily("roberta.", shifted=True, keys=_BERT_KEYS),
    "xlm-roberta": EncoderFamily("roberta.", shifted=True, keys=_BERT_KEYS),
    "camembert": EncoderFamily("roberta.", shifted=True, keys=_BERT_KEYS),
    "mpnet": EncoderFamily("mpnet.", shifted=True, keys=_BERT_KEYS),
    "distilbert": EncoderFamily("distilbert.", keys=_DISTIL_KEYS),
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling: its folder, and its activation `tanh` or `identity`."""

    folder: str
    activation: str


@dataclass(frozen=True, slots=True)
class EncoderModelSpec:
    path: Path
    family: str
    hidden: int
    inner: int
    heads: int
    layers: int
    activation: str
    norm_eps: float
    vocab_size: int
    # most tokens of one input that positions exist for
    positions: int
    first_position: int
    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[DenseLayer, ...] = ()
    normalise: bool = True
    # most tokens of one input that it was trained for
    max_tokens: int = 0
    lower_case: bool = False
    # put before every text; before a query and before a document of a search
    prompt: str = ""
    query_prompt: str = ""
    document_prompt: str = ""
    # it scores pairs of texts; the score is a probability, or the number as the network gives it
    is_cross: bool = False
    sigmoid: bool = True


def read_encoder_spec(path: Path, pooling: str = "auto") -> EncoderModelSpec:
    """Raises WeightsError for a directory that is no encoder, or one that is not supported."""
    config = read_json(path / "config.json")
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise WeightsError(f"{path}: model_type {kind!r} is no encoder here; there is: {known}.")
    if config.get("is_decoder") or config.get("position_embedding_type", "absolute") != "absolute":
        raise WeightsError(f"{path}: only encoders with absolute positions are supported.")
    if config.get("quantization_config"):
        raise WeightsError(f"{path}: quantised encoders are not supported.")
    network = _network(path, config, kind)
    facts = _cross_facts(path, config) if _is_classifier(config) else _sentence_facts(path)
    if pooling != "auto":
        facts["pooling"] = (pooling,)
    spec = EncoderModelSpec(**network, **facts)
    return replace(spec, max_tokens=min(spec.max_tokens or spec.positions, spec.positions))


def _network(path: Path, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    family = FAMILIES[kind]
    sizes = {name: config.get(key) for name, key in family.keys.items()}
    activation = str(sizes.pop("activation"))
    if activation not in _ACTIVATIONS:
        raise WeightsError(f"{path}: the activation {activation!r} is not supported.")
    positions = config.get("max_position_embeddings")
    vocab_size = config.get("vocab_size")
    for name, value in {**sizes, "positions": positions, "vocab_size": vocab_size}.items():
        if type(value) is not int or not 0 < value < 1 << 24:
            raise WeightsError(f"{path}: config.json gives no usable {name}.")
    pad = config.get("pad_token_id")
    first = (pad if type(pad) is int else 1) + 1 if family.shifted else 0
    hidden, heads = int(sizes["hidden"] or 0), int(sizes["heads"] or 1)
    if hidden % heads or not 0 <= first < int(positions or 0):
        raise WeightsError(f"{path}: config.json has sizes that do not fit together.")
    return {
        "path": path,
        "family": kind,
        **sizes,
        "activation": activation,
        "norm_eps": float(config.get("layer_norm_eps", 1e-12)),
        "vocab_size": vocab_size,
        "positions": int(positions or 0) - first,
        "first_position": first,
    }


def _is_classifier(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    return any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in named)


def _cross_facts(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise WeightsError(
            f"{path}: a classifier with {count} labels; one with a single score can rank texts."
        )
    nested = config.get("sentence_transformers")
    given = nested.get("activation_fn") if isinstance(nested, dict) else None
    given = given or config.get("sbert_ce_default_activation_function")
    name = str(given or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise WeightsError(f"{path}: the activation {name!r} of its scores is not supported.")
    return {"is_cross": True, "sigmoid": name == "Sigmoid"}


def _sentence_facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    settings = _optional(path / "sentence_bert_config.json")
    most = settings.get("max_seq_length")
    if type(most) is int and most > 0:
        facts["max_tokens"] = most
    facts["lower_case"] = bool(settings.get("do_lower_case"))
    facts.update(_prompts(_optional(path / "config_sentence_transformers.json")))
    if not (path / "modules.json").exists():
        return facts
    facts["normalise"] = False
    dense: list[DenseLayer] = []
    for module in read_json_list(path / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        folder = str(module.get("path", "")) if isinstance(module, dict) else ""
        if ".." in folder or folder.startswith("/"):
            raise WeightsError(f"{path}: modules.json points outside of the directory.")
        if kind == "Pooling":
            facts["pooling"] = _pooling(path / folder / "config.json")
        elif kind == "Normalize":
            facts["normalise"] = True
        elif kind == "Dense":
            dense.append(DenseLayer(folder, _dense_activation(path / folder / "config.json")))
        elif kind != "Transformer":
            raise WeightsError(f"{path}: the module {kind!r} in modules.json is not supported.")
    facts["dense"] = tuple(dense)
    return facts


def _pooling(file: Path) -> tuple[str, ...]:
    config = read_json(file)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        found = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}.get(named, named)
        modes: tuple[str, ...] = (found,)
    else:
        modes = tuple(mode for key, mode in _POOLING_KEYS.items() if config.get(key) is True)
    others = [
        key
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True and key not in _POOLING_KEYS
    ]
    if others or not modes or any(mode not in POOLINGS for mode in modes):
        raise WeightsError(
            f"{file}: this pooling is not supported; there is {', '.join(POOLINGS)}."
        )
    if config.get("include_prompt") is False:
        raise WeightsError(f"{file}: pooling without the prompt is not supported.")
    return modes


def _dense_activation(file: Path) -> str:
    name = str(read_json(file).get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ("Tanh", "Identity"):
        raise WeightsError(f"{file}: the activation {name!r} is not supported.")
    return name.lower()


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    given = settings.get("prompts")
    listed = given.items() if isinstance(given, dict) else ()
    prompts = {str(name): text for name, text in listed if isinstance(text, str)}
    default = prompts.get(str(settings.get("default_prompt_name")), "")

    def first(names: tuple[str, ...]) -> str:
        return next((prompts[name] for name in names if prompts.get(name)), default)

    return {
        "prompt": default,
        "query_prompt": first(_QUERY_PROMPTS),
        "document_prompt": first(_DOCUMENT_PROMPTS),
    }


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
