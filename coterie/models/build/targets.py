"""Which modules adapters may change: Hugging Face module path -> the matrix as it was loaded.

The reader records every product that it makes; nothing is computed before an adapter needs it. This
module decides which modules can be adapted, and has a sentence for each that cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.adapters import AdaptableModules
from coterie.core.errors import WeightsError
from coterie.kernels.cpu.layers import PackedLinear
from coterie.kernels.linear import ReferenceLinear

if TYPE_CHECKING:
    from coterie.kernels.linear import Linear
    from coterie.kernels.patch import Site
    from coterie.models.spec import ModelSpec

# module name -> part, below "model.layers.N."
_PARTS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_a_proj": "q_a",
    "self_attn.q_b_proj": "q_b",
    "self_attn.kv_a_proj_with_mqa": "kv_a",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "mlp.shared_experts.gate_proj": "shared_gate",
    "mlp.shared_experts.up_proj": "shared_up",
    "mlp.shared_experts.down_proj": "shared_down",
}
_HEAD = "lm_head"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# pattern in a path -> why the module cannot be adapted
_REASONS = (
    (r"embed_tokens$", "embeddings are not adapted"),
    (r"\.kv_b_proj$", "it is absorbed into its neighbours: latent attention never computes it"),
    (r"\.experts(\.|$)", "adapters on routed experts are not supported: experts come and go"),
    (r"(block_sparse_moe|mlp)\.gate$", "the router is not adapted"),
    (r"norm$", "norms are not adapted"),
)


@dataclass(slots=True)
class TargetMatrix:
    """One module's rows in a product. A `Target` of adapters/base.py."""

    site: Site
    product: Linear
    # the first of the module's rows in the product
    first: int
    out_features: int
    # returns the module's weight as it was read, dense, in the module's own order
    read: Callable[[], Tensor]
    bias: Tensor | None = None
    order: Tensor | None = None
    in_features: int = field(init=False)
    _norms: Tensor | None = field(default=None, repr=False)
    _own: PackedLinear | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.in_features = self.product.in_features

    @torch.inference_mode()
    def row_norms_squared(self) -> Tensor:
        if self._norms is None:
            self._norms = self._norms_squared()
        return self._norms

    @torch.inference_mode()
    def project(self, x: Tensor) -> Tensor:
        last = self.first + self.out_features
        packed = self._packed()
        if packed is not None:
            rows = packed(x)
        elif isinstance(self.product, ReferenceLinear):
            weight = self.product.weight[self.first : last]
            rows = (x.to(weight.device) @ weight.float().T).cpu()
        else:
            rows = self.product(x)[:, self.first : last].cpu()
        return self._in_order(rows)

    def _norms_squared(self) -> Tensor:
        """Computed from the weight that the kernels use, in the module's own order."""
        packed = self._packed()
        if packed is not None:
            return self._in_order(packed.row_norms_squared())
        if isinstance(self.product, ReferenceLinear):
            weight = self.product.weight[self.first : self.first + self.out_features]
            return self._in_order(_squares(weight))
        return _squares(self.read())

    def _packed(self) -> PackedLinear | None:
        """Only the module's rows, where the product can separate them."""
        if self._own is None and isinstance(self.product, PackedLinear):
            self._own = self.product.whole_weight(self.first, self.out_features)
        return self._own

    def _in_order(self, rows: Tensor) -> Tensor:
        """[..., out] in the product's order -> in the module's order."""
        if self.order is None:
            return rows
        back = torch.empty_like(rows)
        back[..., self.order] = rows
        return back


def _squares(weight: Tensor) -> Tensor:
    """|W_i|^2, fp64 on the host."""
    norms: Tensor = torch.linalg.vector_norm(weight.float(), dim=1)
    return norms.cpu().double().square()


class ModelTargets:
    """The targets that a reader recorded. An `AdaptableModel` of adapters/base.py."""

    def __init__(self, spec: ModelSpec, matrices: Mapping[str, TargetMatrix]) -> None:
        self.hidden = spec.hidden
        self._spec, self._matrices = spec, matrices

    def find(self, path: str) -> TargetMatrix:
        found = self._matrices.get(path)
        if found is None:
            raise WeightsError(f"{path}: {self._reason(path)}")
        return found

    def modules(self) -> AdaptableModules:
        """The modules that can be changed, for checks that do not load weights."""
        found = self._matrices.items()
        shapes = {path: (matrix.in_features, matrix.out_features) for path, matrix in found}
        return AdaptableModules(self.hidden, shapes, any(m.bias is not None for _, m in found))

    def _reason(self, path: str) -> str:
        spec = self._spec
        if not self._matrices:
            return f"{spec.architecture} takes no adapters on its modules"
        for pattern, reason in _REASONS:
            if re.search(pattern, path):
                return reason
        layer = _LAYER.fullmatch(path)
        if layer and int(layer[1]) >= spec.num_layers:
            return f"the model has {spec.num_layers} layers: the adapter is for another model"
        if layer and spec.moe and int(layer[1]) in spec.moe.layers and layer[2].startswith("mlp."):
            return "this layer has routed experts in place of one MLP"
        return f"{spec.architecture} has no such module: the adapter is for another model"


def site_of(path: str) -> Site | None:
    """None for a module that cannot be adapted."""
    if path == _HEAD:
        return -1, "head"
    layer = _LAYER.fullmatch(path)
    part = _PARTS.get(layer[2]) if layer else None
    return None if layer is None or part is None else (int(layer[1]), part)
