"""Trainable adapters by PEFT's formulas: LoRA, DoRA, IA3 around a frozen linear layer, and a soft
prompt before the tokens. Knows no data and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ("lora", "dora", "ia3", "soft_prompt")


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of an adapter of one kind; fields for other kinds are not read."""

    kind: str
    targets: tuple[str, ...] = ALL_LINEAR
    rank: int = 4
    alpha: int = 8
    # IA3: targets whose input is scaled instead of their output
    feedforward: tuple[str, ...] = ("down_proj",)
    # soft prompt: its initial vectors are the embeddings of this text, one virtual token each
    text: str = ""


class Lora(nn.Module):
    """y = W x + s B A x."""

    def __init__(self, base: nn.Linear, shape: Shape) -> None:
        super().__init__()
        self.base, self.scaling = base, shape.alpha / shape.rank
        where = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(shape.rank, base.in_features, **where))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, shape.rank, **where))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def low_rank(self, x: Tensor) -> Tensor:
        inner = functional.linear(x, self.lora_A.to(x.dtype))
        return functional.linear(inner, (self.scaling * self.lora_B).to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.low_rank(x)
        return out

    def tensors(self) -> dict[str, Tensor]:
        return {
            "lora_A.weight": self.lora_A.to(torch.bfloat16),
            "lora_B.weight": self.lora_B.to(torch.bfloat16),
        }


class Dora(Lora):
    """y = g (W x + s B A x), g = m / |W + s B A| per row; the norm has no gradient."""

    def __init__(self, base: nn.Linear, shape: Shape) -> None:
        super().__init__(base, shape)
        weight = base.weight.float()
        self.squared: Tensor
        self.register_buffer("squared", (weight * weight).sum(1), persistent=False)
        self.lora_magnitude_vector = nn.Parameter(self.squared.sqrt())

    def norm(self) -> Tensor:
        """|W + s B A| per row, without computing the sum: [out]."""
        a, b = self.lora_A.detach(), self.scaling * self.lora_B.detach()
        crossed = functional.linear(a.to(self.base.weight.dtype), self.base.weight).float().T
        inner = b @ (a @ a.T)
        return (self.squared + 2 * (crossed * b).sum(1) + (inner * b).sum(1)).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        gain = (self.lora_magnitude_vector / self.norm()).to(x.dtype)
        out: Tensor = gain * (self.base(x) + self.low_rank(x))
        return out

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "lora_magnitude_vector": self.lora_magnitude_vector}


class Ia3(nn.Module):
    """y = l * (W x), or W (l * x) for a feed-forward target."""

    def __init__(self, base: nn.Linear, feedforward: bool) -> None:
        super().__init__()
        self.base, self.feedforward = base, feedforward
        size = (1, base.in_features) if feedforward else (base.out_features, 1)
        self.ia3_l = nn.Parameter(torch.ones(size, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.ia3_l.flatten().to(x.dtype)
        out: Tensor = self.base(x * scale) if self.feedforward else self.base(x) * scale
        return out

    def tensors(self) -> dict[str, Tensor]:
        return {"ia3_l": self.ia3_l}


class Adapted:
    """A base model with one adapter. `detach` restores the base."""

    def __init__(self, model: nn.Module, shape: Shape, encode: Callable[[str], list[int]]) -> None:
        self.model, self.shape = model, shape
        self.prompt: nn.Parameter | None = None
        self._modules: dict[str, nn.Module] = {}
        if shape.kind == "soft_prompt":
            ids = torch.tensor(encode(shape.text), device=model.device)
            self.prompt = nn.Parameter(model.get_input_embeddings()(ids).float().clone())
            return
        wanted = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear) and path.rpartition(".")[2] in shape.targets
        ]
        for path, module in wanted:
            self._modules[path] = _wrapped(path.rpartition(".")[2], module, shape)
        self.attach()

    def parameters(self) -> list[nn.Parameter]:
        if self.prompt is not None:
            return [self.prompt]
        modules = self._modules.values()
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        """By the names PEFT gives them."""
        if self.prompt is not None:
            return {"prompt_embeddings": self.prompt}
        return {
            f"base_model.model.{path}.{name}": tensor
            for path, module in self._modules.items()
            for name, tensor in module.tensors().items()
        }

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states of `ids` [rows, length], right padded: causal attention needs no mask."""
        embeds = self.model.get_input_embeddings()(ids)
        if self.prompt is None:
            return self.model.model(inputs_embeds=embeds, use_cache=False)[0]
        front = self.prompt.to(embeds.dtype).expand(len(ids), -1, -1)
        both = torch.cat([front, embeds], dim=1)
        return self.model.model(inputs_embeds=both, use_cache=False)[0][:, len(self.prompt) :]

    def attach(self) -> None:
        for path, module in self._modules.items():
            self._put(path, module)

    def detach(self) -> None:
        for path, module in self._modules.items():
            self._put(path, module.base)

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)


def _wrapped(name: str, base: nn.Linear, shape: Shape) -> nn.Module:
    if shape.kind == "ia3":
        return Ia3(base, name in shape.feedforward)
    return Dora(base, shape) if shape.kind == "dora" else Lora(base, shape)
