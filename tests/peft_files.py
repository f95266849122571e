"""Adapters made by PEFT itself, for tests: random directories of every kind, and its answers.

`make_adapter(model, kind, seed, **options)` writes a directory as `save_pretrained` does, with
weights that all do something. `PeftOracle(model).logits(ids, [(directory, weight), ...])` is what
PEFT computes for a stack that PEFT can hold: LoRAs and DoRAs in any number, IA3s, one soft prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

KINDS = ("lora", "dora", "ia3", "soft_prompt")
# what a dense model's layers are made of
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

# a directory PEFT wrote, and the weight it is given in a stack
Stack = Sequence[tuple[Path, float]]


def make_adapter(model: Any, kind: str, seed: int = 0, **options: Any) -> Path:
    """A PEFT directory for `model` (a directory, a GGUF file or a loaded transformers model).

    `options` are those of the kind's PEFT config: r, lora_alpha, target_modules, use_rslora,
    rank_pattern, num_virtual_tokens ... `dtype` ("bfloat16") is what the tensors are stored as,
    `strength` multiplies the random weights. Same arguments give the same directory, made once,
    unless `model` is a loaded one.
    """
    if not isinstance(model, (str, Path)):
        return _write(model, kind, seed, dict(options), Path(tempfile.mkdtemp()))
    # a function of the source too: a changed recipe must not find old files
    facts = json.dumps([str(model), kind, seed, options], sort_keys=True, default=list)
    digest = hashlib.sha256((facts + Path(__file__).read_text()).encode()).hexdigest()[:16]
    home = Path(tempfile.gettempdir()) / f"coterie-peft-{os.getuid()}"
    home.mkdir(exist_ok=True)
    path = home / f"{kind}-{digest}"
    if not path.exists():
        draft = _write(base_model(Path(model)), kind, seed, dict(options), _draft(home))
        with contextlib.suppress(OSError):
            # another process may have been first
            draft.rename(path)
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _draft(home: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=home))


def base_model(path: Path) -> Any:
    """transformers' model in fp32, without adapters: its own copy, since PEFT changes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        return _from_gguf(path)
    AutoConfig.from_pretrained(path)
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
    """PEFT in fp32 over a model. Every question loads its adapters and takes them off again."""

    def __init__(self, model: Path | str) -> None:
        self.path = Path(model)
        self._model = base_model(self.path)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], stack: Stack = ()) -> Tensor:
        """[tokens, vocab] at the positions of `ids` (not of virtual tokens)."""
        given = torch.tensor([list(ids)])
        with self.adapted(stack) as model:
            out = model(given, attention_mask=torch.ones_like(given)).logits[0]
        return out[-len(ids) :].float()

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], stack: Stack = (), count: int = 16) -> list[int]:
        """`count` tokens by PEFT's own generate."""
        given = torch.tensor([list(ids)])
        with self.adapted(stack) as model, _quiet():
            out = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    @torch.no_grad()
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
    def adapted(self, stack: Stack) -> Iterator[Any]:
        """The PEFT model of a stack: its adapters active together, in order, at their weights."""
        from peft import PeftModel

        if not stack:
            yield self._model
            return
        with _quiet():
            model: Any = None
            for place, (directory, _) in enumerate(stack):
                if model is None:
                    model = PeftModel.from_pretrained(self._model, directory, adapter_name="a0")
                else:
                    model.load_adapter(directory, adapter_name=f"a{place}")
            names = [f"a{place}" for place in range(len(stack))]
            weights = [weight for _, weight in stack]
            if len(stack) > 1:
                model.base_model.set_adapter(names)
            _weigh(model, names, weights)
            model.eval()
        try:
            yield model
        finally:
            if hasattr(model.base_model, "unload"):
                with _quiet():
                    model.unload()


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
