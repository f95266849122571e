"""Checks settings as a whole, before anything is fetched, loaded or changed: names, files, keys.

Never reads a secret into a message: a key is looked for, not shown.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from coterie.core.config import Config, SpecialistSettings
from coterie.core.encoders import ENCODER, STATIC
from coterie.core.ensemble import EnsembleSettings, RemoteSettings
from coterie.core.errors import ConfigError, WeightsError
from coterie.core.references import reference_faults
from coterie.obs.tracing.tracer import receiver_of
from coterie.routing.classify.structure import STRUCTURES
from coterie.service.breaker.watch import judging
from coterie.service.validate.code import GRAMMARS
from coterie.service.validate.table import NAMED_CHECKS, VALIDATORS
from coterie.weights.sources.hub import parse as parse_hub
from coterie.weights.sources.names import find_named, source_of
from coterie.weights.sources.pypi import parse as parse_wheel
from coterie.weights.sources.source import DEFAULT_MODEL, list_cached, resolve

# `ensemble.router`: the routers of this release
SHIPPED_ROUTER = "shipped"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# the part of a file name that names the precision, not the model
_QUANTISATION = re.compile(r"[.\-_](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", re.IGNORECASE)


def model_name(model: str, path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` is served as `smollm2-135m-instruct`, a model by its short
    name as that: `qwen3:4b` as `qwen3-4b`."""
    if short := _short_name(model):
        return short
    if model.startswith("hf:"):
        hub = parse_hub(model[3:])
        if hub.file is None:
            # the folder of a downloaded snapshot is named by a hash
            return hub.repo.rpartition("/")[2].lower()
        path = Path(hub.file)
    # abspath: "." and ".." are no names. A symbolic link keeps its own name.
    path = Path(os.path.abspath(path))
    stem = path.stem if path.suffix == ".gguf" else path.name
    return _QUANTISATION.sub("", stem).lower()


def _short_name(model: str) -> str:
    """Of a model that was asked for by its short name; the default one keeps its file's."""
    named = find_named(model)
    if named is None or named.source == DEFAULT_MODEL:
        return ""
    return named.name.replace(":", "-")


def expected_names(config: Config) -> list[str]:
    """The names that the specialists will be served by, without fetching a model. One whose name
    comes from a file that is not here yet has its model's text for a name."""
    return [item.name or _expected_name(item.model) for item in config.specialists]


def encoder_names(config: Config) -> list[str]:
    """The names of the encoders, without fetching a model."""
    return [
        item.name or (STATIC if item.model == STATIC else _expected_name(item.model))
        for item in config.encoders
    ]


def _expected_name(model: str) -> str:
    if short := _short_name(model):
        return short
    text = source_of(model or DEFAULT_MODEL)
    if text.startswith("pypi:"):
        here = [item.path for item in list_cached() if item.source.partition("==")[0] == text]
        return model_name(text, here[-1]) if here else text
    try:
        return model_name(text, Path(text) if text.startswith("hf:") else resolve(text))
    except WeightsError:
        return text


def config_faults(config: Config, names: Sequence[str]) -> Iterator[ConfigError]:
    """Every fault of the settings, but for models: `model_faults`. `names`: the served names of
    the specialists."""
    encoders = encoder_names(config)
    yield from reference_faults(config, names, NAMED_CHECKS, encoders, tuple(STRUCTURES))
    for index, settings in enumerate(config.specialists):
        where = f"specialists.{settings.name or index}"
        yield from _strategy_faults(settings.moe.strategy, f"{where}.moe.strategy")
        yield from _check_faults(settings.checks, f"{where}.checks")
        yield from _key_faults(settings.remote, f"{where}.remote")
        if settings.adapters and not config.adapters.device_bytes:
            text = "this server runs no experts: adapters.device_bytes is 0"
            yield ConfigError(f"{where}.adapters: {text}", param=f"{where}.adapters")
    if not _DEVICE.fullmatch(config.engine.device):
        text = f"engine.device is {config.engine.device!r}; it must be auto, cpu, cuda or cuda:N"
        yield ConfigError(text, param="engine.device")
    yield from _validator_faults(config)
    if config.tracing.endpoint:
        try:
            receiver_of(config.tracing)
        except ConfigError as error:
            yield error
    folder = config.ensemble.router
    if folder and folder != SHIPPED_ROUTER and not Path(folder).expanduser().is_dir():
        text = f"ensemble.router: there is no folder {folder!r}"
        yield ConfigError(text, param="ensemble.router")


def config_notes(config: Config, names: Sequence[str]) -> Iterator[str]:
    """Settings that are accepted and can never do what they say, each with its key."""
    ensemble = config.ensemble
    specialists = dict(zip(names, config.specialists, strict=True))
    watched = {
        name: judging(item.checks) or item.slo.correctness > 0 for name, item in specialists.items()
    }
    for name, item in specialists.items():
        where, is_base = f"specialists.{name}", name == names[0]
        if item.checks and not judging(item.checks):
            key = "slo.correctness" if item.slo.correctness else "checks"
            yield f"{where}.{key}: `generic` judges no answer, so correctness stays unknown"
        elif not watched[name] and not is_base and ensemble.fresh_shadow and ensemble.max_shadows:
            text = "without checks or slo.correctness it is not shadowed while it is fresh"
            yield f"{where}.checks: {text}"
        if item.fallback and item.fallback != names[0] and not watched.get(item.fallback, True):
            text = f"{item.fallback!r} has no checks and no slo.correctness"
            yield f"{where}.fallback: {text}: nothing is known of it, so it does not answer"
        if item.slo.correctness:
            yield from _floor_notes(ensemble, item, name, is_base=is_base)
    yield from _validator_notes(config)


def _floor_notes(
    ensemble: EnsembleSettings, item: SpecialistSettings, name: str, *, is_base: bool
) -> Iterator[str]:
    """Whether its breaker can do anything, and whether its answers can bring it back."""
    where = f"specialists.{name}"
    if is_base and not item.fallback:
        text = "without a fallback the first specialist goes on answering"
        yield f"{where}.slo.correctness: {text}"
    elif item.remote.url and not item.remote.shadow:
        text = "without shadows only callers who name it can bring it back from its breaker"
        yield f"{where}.remote.shadow: {text}"
    elif not ensemble.max_shadows or not ensemble.shadow_sample:
        key = "shadow_sample" if ensemble.max_shadows else "max_shadows"
        text = f"{name!r} gets no shadows: only callers who name it can bring it back"
        yield f"ensemble.{key}: {text} from its breaker"


def _validator_notes(config: Config) -> Iterator[str]:
    for item in config.validators:
        if item.name in VALIDATORS or item.name in NAMED_CHECKS:
            text = "a built-in validator has this name, and checks of that name mean it"
            yield f"validators.{item.name}.name: {text} too; choose another"


def check(config: Config, names: Sequence[str]) -> None:
    """Raises the first fault."""
    for fault in config_faults(config, names):
        raise fault


def weight_copies(config: Config, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The specialists of each engine: they share one copy of the weights."""
    engines: dict[tuple[object, ...], list[str]] = {}
    for name, item in zip(names, config.specialists, strict=True):
        if not item.remote.url:
            key = (item.model or DEFAULT_MODEL, item.dtype, item.moe)
            engines.setdefault(key, []).append(name)
    return [tuple(members) for members in engines.values()]


def _strategy_faults(text: str, param: str) -> Iterator[ConfigError]:
    if text == "auto":
        return
    from coterie.moe.dispatch.table import parse_strategy

    try:
        parse_strategy(text)
    except ConfigError as error:
        yield ConfigError(f"{param}: {error.message}", param=param)


def model_faults(config: Config) -> Iterator[ConfigError]:
    """Models that cannot be found; those that would be fetched count as found."""
    for index, settings in enumerate((*config.specialists, *config.encoders)):
        model, param = settings.model, f"specialists.{settings.name or index}.model"
        if settings.kind == ENCODER and model == STATIC:
            continue
        try:
            source = source_of(model)
            if source.startswith("hf:"):
                parse_hub(source[3:])
            elif source.startswith("pypi:"):
                parse_wheel(source[5:])
            elif source:
                resolve(source)
        except WeightsError as error:
            yield ConfigError(f"{param}: {error.message}", param=param)


def _check_faults(checks: Sequence[str], param: str) -> Iterator[ConfigError]:
    for name in checks:
        module = GRAMMARS[name][0] if name in GRAMMARS else "json"
        if find_spec(module) is None or (name in GRAMMARS and find_spec("tree_sitter") is None):
            package = module.replace("_", "-")
            text = f"{name!r} needs packages that are not installed: pip install tree-sitter"
            yield ConfigError(f"{param}: {text} {package}", param=param)


def _validator_faults(config: Config) -> Iterator[ConfigError]:
    for item in config.validators:
        if item.command and shutil.which(item.command[0]) is None:
            param = f"validators.{item.name}.command"
            text = f"there is no program {item.command[0]!r} to run"
            yield ConfigError(f"{param}: {text}", param=param)


def _key_faults(remote: RemoteSettings, where: str) -> Iterator[ConfigError]:
    if remote.key_env and not os.environ.get(remote.key_env):
        param = f"{where}.key_env"
        text = f"the environment variable {remote.key_env} is not set"
        yield ConfigError(f"{param}: {text}", param=param)
    if remote.key_file:
        param, path = f"{where}.key_file", Path(remote.key_file).expanduser()
        try:
            empty = not path.read_bytes().strip()
        except OSError as error:
            text = f"cannot read {remote.key_file}: {error.strerror}"
            yield ConfigError(f"{param}: {text}", param=param)
        else:
            if empty:
                yield ConfigError(f"{param}: {remote.key_file} is empty", param=param)
