"""The function that one module computes while the adapters of a stack are applied, one by one.

f(x) = out * (W (inner * x)) + constant + sum of (x a^T) b: every kind of adapter keeps this form,
which is why any stack can be reduced to one patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coterie.adapters import base
from coterie.kernels.patch import Patch
from coterie.packages.adapter_kinds import is_exact

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import TargetModule


class ModulePatchBuilder:
    def __init__(self, target: TargetModule) -> None:
        self.target = target
        self._inner: Tensor | None = None  # [in] fp32
        self._out: Tensor | None = None  # [out] fp32
        # the bias with all changes so far; None if the module has none
        self._constant = None if target.bias is None else target.bias.detach().cpu().float()
        self._bias = self._constant
        self._terms: list[tuple[Tensor, Tensor]] = []  # a [r, in], b [r, out]

    def add(self, a: Tensor, b: Tensor, strength: float) -> None:
        """f(x) + strength * (x a^T) b^T, both factors as stored: a [r, in], b [out, r]."""
        # scalings other than powers of two are computed in fp32
        exact = b.dtype == torch.bfloat16 and is_exact(strength)
        rows = transposed(b if exact else b.float())
        self.join(a, rows if strength == 1 else rows.mul_(strength))

    def join(self, a: Tensor, b: Tensor) -> None:
        """f(x) + (x a^T) b: a [r, in], b [r, out]."""
        self._terms.append((a, b))

    def scale_input(self, vector: Tensor) -> None:
        """f(vector * x)."""
        self._inner = vector if self._inner is None else self._inner * vector
        self._terms = [(a.float() * vector, b) for a, b in self._terms]

    def scale_output(self, vector: Tensor) -> None:
        """vector * f(x)."""
        self._scale(vector)
        if self._constant is not None:
            self._constant = self._constant * vector

    def scale_product(self, vector: Tensor) -> None:
        """vector * (f(x) - bias) + bias."""
        self._scale(vector)
        if self._constant is not None and self._bias is not None:
            self._constant = (self._constant - self._bias) * vector + self._bias

    def patch(self) -> Patch | None:
        """None if the module is not changed."""
        a, b = self._factors()
        out, shift = self._out, self._shift()
        order = self.target.order
        if order is not None:
            b, out, shift = (None if part is None else part[..., order] for part in (b, out, shift))
        if a is None and self._inner is None and out is None and shift is None:
            return None
        return Patch(a=a, b=b, in_scale=self._inner, out_scale=out, shift=shift)

    def _scale(self, vector: Tensor) -> None:
        self._out = vector if self._out is None else self._out * vector
        self._terms = [(a, b.float() * vector) for a, b in self._terms]

    def _shift(self) -> Tensor | None:
        if self._constant is None or self._bias is None or self._constant is self._bias:
            return None
        shift = self._constant - self._bias
        return shift if bool(shift.any()) else None

    def _factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Both in fp32, or both in bf16 if all were stored so and scaling was exact: a step then
        reads half the bytes of the same values."""
        if not self._terms:
            return None, None
        narrow = all(part.dtype == torch.bfloat16 for term in self._terms for part in term)
        dtype = torch.bfloat16 if narrow else torch.float32
        if len(self._terms) == 1:
            a, b = self._terms[0]
            return a.to(dtype).contiguous(), b.to(dtype)
        pairs = zip(*self._terms, strict=True)
        a, b = (torch.cat([part.to(dtype) for part in parts]) for parts in pairs)
        return a, b


_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is a number; `tensor` is contiguous."""
    words = tensor.view(_WORDS[tensor.dtype]).numpy().reshape(-1)
    return base.is_finite(words, _NAMES[tensor.dtype])


def transposed(matrix: Tensor) -> Tensor:
    """The transpose, row by row in its own memory."""
    kind = _WORDS[matrix.dtype]
    columns = matrix.view(kind).numpy().T
    return torch.from_numpy(np.array(columns, order="C")).view(matrix.dtype)
