"""Adapters made by PEFT itself, for tests: random directories of every kind, and its answers.

`make_adapter(model, kind, seed, **options)` writes a directory as `save_pretrained` does, with
weights that all do something. `peft_oracle(model).logits(ids, [(directory, weight), ...])` is what
PEFT computes for a stack, `.greedy(...)` what it answers.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.helpers.folders import CHECKPOINTS, temporary_folder

KINDS = ("lora", "dora", "ia3", "soft_prompt")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

# a directory PEFT wrote, and the weight it is given in a stack
Stack = Sequence[tuple[Path, float]]


def make_adapter(model: Any, kind: str, seed: int = 0, **options: Any) -> Path:
    """A PEFT directory for `model` (a directory, a GGUF file or a loaded transformers model).

    `options` are those of the kind's PEFT config: r, lora_alpha, target_modules, use_rslora,
    rank_pattern, num_virtual_tokens ... `dtype` ("bfloat16") is what the tensors are stored as,
    `strength` multiplies the random weights. Same arguments, same directory, made once.
    """
    if not isinstance(model, (str, Path)):
        return _write(model, kind, seed, dict(options), temporary_folder())
    facts = json.dumps([str(model), kind, seed, options], sort_keys=True, default=list)
    digest = hashlib.sha256((facts + Path(__file__).read_text()).encode()).hexdigest()[:16]
    home = CHECKPOINTS / "peft"
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{kind}-{digest}"
    if not path.exists():
        draft = _write(
            base_model(Path(model)), kind, seed, dict(options), Path(tempfile.mkdtemp(dir=home))
        )
        with contextlib.suppress(OSError):
            # another process may have been first
            draft.rename(path)
        shutil.rmtree(draft, ignore_errors=True)
    return path


def base_model(path: Path) -> Any:
    """transformers' model in fp32, without adapters: its own copy, since PEFT changes it."""
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        return _from_gguf(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _from_gguf(path: Path) -> Any:
    """Its values, widened, go in by name."""
    import transformers

    from coterie.weights.checkpoint import open_checkpoint
    from coterie.weights.quantize import dense

    checkpoint = open_checkpoint(path)
    model_class = getattr(transformers, checkpoint.config["architectures"][0])
    config = model_class.config_class(**checkpoint.config)
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    model.load_state_dict(
        {name: dense(checkpoint.read(name)) for name in checkpoint.names()}, strict=False
    )
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _write(model: Any, kind: str, seed: int, options: dict[str, Any], path: Path) -> Path:
    from peft import get_peft_model

    dtype = getattr(torch, options.pop("dtype", "float32"))
    strength = options.pop("strength", 1.0)
    with _quiet():
        wrapped = get_peft_model(model, _config(kind, options))
        _draw(wrapped, kind, seed, strength)
        wrapped.save_pretrained(path)
        if kind != "soft_prompt":
            wrapped.unload()
    _recast(path / "adapter_model.safetensors", dtype)
    return path


def _config(kind: str, options: dict[str, Any]) -> Any:
    import peft

    if kind == "soft_prompt":
        return peft.PromptTuningConfig(
            task_type="CAUSAL_LM", **{"num_virtual_tokens": 5, **options}
        )
    if kind == "ia3":
        wanted = {"target_modules": ["k_proj", "v_proj", "down_proj"], **options}
        inner = [name for name in wanted["target_modules"] if name.endswith("down_proj")]
        return peft.IA3Config(task_type="CAUSAL_LM", **{"feedforward_modules": inner, **wanted})
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LINEAR), **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", use_dora=kind == "dora", **wanted)


def _draw(wrapped: Any, kind: str, seed: int, strength: float) -> None:
    """Nothing stays where PEFT began: B is zero there, IA3's vectors one, magnitudes |W|."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * strength
        if ".lora_A." in name or ".lora_B." in name:
            parameter.data = noise * (0.15 if ".lora_A." in name else 0.2)
        elif "lora_magnitude_vector" in name:
            parameter.data = parameter.data * (1 + 0.15 * noise)
        elif ".ia3_l." in name:
            parameter.data = 1 + 0.3 * noise
        elif "prompt_encoder" in name:
            parameter.data = 0.2 * noise


def _recast(path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    if dtype != torch.float32:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


class PeftOracle:
    """PEFT in fp32 over a model. Every question loads its adapters and takes them off again.

    A stack of one family (LoRA with DoRA, or IA3) is several active adapters of one PEFT model. A
    stack of both is PEFT models around one another, in order: each wraps what is there already.
    One soft prompt alone is PEFT's own; with others, its vectors go in front as inputs_embeds.
    """

    def __init__(self, model: Path | str) -> None:
        self.path = Path(model)
        self._model = base_model(self.path)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], stack: Stack = ()) -> Tensor:
        """[tokens, vocab] at the positions of `ids` (not of virtual tokens)."""
        with self._asked(ids, stack) as (model, given):
            out = model(**given).logits[0]
        return out[-len(ids) :].float()

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], stack: Stack = (), count: int = 16) -> list[int]:
        """`count` tokens by PEFT's (or transformers') own generate."""
        with self._asked(ids, stack) as (model, given), _quiet():
            out = model.generate(
                **given,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        # behind inputs_embeds only what is new comes back
        return [int(token) for token in out[0, -count:]]

    def follow(self, ids: Sequence[int], stack: Stack, answer: Sequence[int]) -> list[int]:
        """The greedy answer as far as `answer` agrees with it, and what should have come next:
        one pass instead of one per token."""
        logits = self.logits([*ids, *answer], stack)
        best: list[int] = logits.argmax(-1)[len(ids) - 1 : -1].tolist()
        for place, (mine, theirs) in enumerate(zip(answer, best, strict=True)):
            if mine != theirs:
                return [*answer[:place], theirs]
        return list(answer)

    @contextlib.contextmanager
    def _asked(self, ids: Sequence[int], stack: Stack) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """The model of a stack and what it is called with."""
        given = torch.tensor([list(ids)])
        soft = [part for part in stack if _family(part[0]) == "soft_prompt"]
        rest = [part for part in stack if part not in soft]
        if not soft or len(stack) == 1:
            with self.adapted(stack) as model:
                yield model, {"input_ids": given, "attention_mask": torch.ones_like(given)}
            return
        with self.adapted(rest) as model:
            words = self._model.get_input_embeddings()(given)
            front = [soft_vectors(path) * weight for path, weight in soft]
            joined = torch.cat([torch.cat(front)[None], words], dim=1)
            mask = torch.ones(joined.shape[:2], dtype=torch.long)
            yield model, {"inputs_embeds": joined, "attention_mask": mask}

    @contextlib.contextmanager
    def adapted(self, stack: Stack) -> Iterator[Any]:
        """The PEFT model of a stack of modules' adapters, or of one soft prompt."""
        runs = [list(run) for _, run in groupby(stack, lambda part: _family(part[0]))]
        if len(runs) > 1:
            model = copy.deepcopy(self._model)
            for depth, run in enumerate(runs):
                # names are told apart: one of the inner model must not be weighed again
                outer = _wrapped(model, run, depth)
                model = outer.get_base_model()
            _activate(outer)
            yield outer
        elif runs:
            model = _wrapped(self._model, runs[0])
            try:
                yield model
            finally:
                if hasattr(model.base_model, "unload"):
                    with _quiet():
                        model.unload()
        else:
            yield self._model


def _family(directory: Path) -> str:
    """Adapters of one family can be active together in one PEFT model."""
    kind = json.loads((directory / "adapter_config.json").read_text())["peft_type"]
    return {"LORA": "lora", "IA3": "ia3", "PROMPT_TUNING": "soft_prompt"}[kind]


def soft_vectors(directory: Path) -> Tensor:
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")["prompt_embeddings"].float()


def _wrapped(model: Any, stack: Stack, depth: int = 0) -> Any:
    """One PEFT model with these adapters active, in order, at their weights."""
    from peft import PeftModel

    with _quiet():
        names = [f"depth{depth}_{place}" for place in range(len(stack))]
        wrapped = PeftModel.from_pretrained(model, stack[0][0], adapter_name=names[0])
        for name, (directory, _) in list(zip(names, stack, strict=True))[1:]:
            wrapped.load_adapter(directory, adapter_name=name)
        if len(stack) > 1:
            wrapped.base_model.set_adapter(names)
        _weigh(wrapped, names, [weight for _, weight in stack])
        return wrapped.eval()


def _activate(model: Any) -> None:
    """All adapters: wrapping once more switches off inner ones of the same family."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module._active_adapter = list(module.scaling)
        elif isinstance(module, IA3Layer):
            module._active_adapter = list(module.ia3_l.keys())


def _weigh(model: Any, names: Sequence[str], weights: Sequence[float]) -> None:
    """LoRA and DoRA by PEFT's scaling; IA3 as 1 + w (l - 1); a soft prompt's vectors times w."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        for name, weight in zip(names, weights, strict=True):
            if isinstance(module, LoraLayer) and name in module.scaling:
                module.scaling[name] *= weight
            if isinstance(module, IA3Layer) and name in module.ia3_l:
                vector = module.ia3_l[name]
                vector.data = 1 + weight * (vector.data - 1)
    for encoder, weight in zip(
        getattr(model, "prompt_encoder", {}).values(), weights, strict=False
    ):
        encoder.embedding.weight.data = encoder.embedding.weight.data * weight


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns of what tests do on purpose. And target_modules name modules: PEFT 0.21 would turn
    an MLP's names into the stacked parameters of routed experts wherever a model has some."""
    from peft.utils import transformers_weight_conversion as conversion

    with warnings.catch_warnings(), mock.patch.object(conversion, "_convert_peft_config_moe"):
        warnings.simplefilter("ignore")
        yield


@cache
def peft_oracle(path: Path) -> PeftOracle:
    return PeftOracle(path)
