"""Runs kernels that are written in Gluon, program by program: Triton's own interpreter knows only
Triton. Tensors are torch's. Layouts mean nothing here: the compiler checks them. The only assembly
is that of `expert_int4` and `int4_rows`. A copy to shared memory is complete at once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor


class Value:
    """A tensor of a kernel."""

    def __init__(self, tensor: Any) -> None:
        self.tensor: Tensor = torch.as_tensor(tensor)
        self.dtype = self.tensor.dtype
        self.type = types.SimpleNamespace(layout=None)

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, _PointerType):
            return Address(self.tensor, dtype.element)
        return Value(self.tensor.view(dtype) if bitcast else self.tensor.to(dtype))

    def __getitem__(self, place: Any) -> Value:
        return Value(self.tensor[place])

    def __index__(self) -> int:
        return int(self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __neg__(self) -> Value:
        return Value(-self.tensor)


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer | Address):
            return NotImplemented
        given = other.tensor if isinstance(other, Value) else other
        found = getattr(self.tensor, name)(given)
        return found if found is NotImplemented else Value(found)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "lshift", "rshift"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        if hasattr(Tensor, _form):
            setattr(Value, _form, _operator(_form))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__hash__ = object.__hash__  # type: ignore[method-assign, assignment]


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def __getitem__(self, place: Any) -> Pointer:
        return Pointer(self.memory, self.offset[place])


class _PointerType:
    def __init__(self, element: torch.dtype) -> None:
        self.element = element


class Address:
    """Memory of a process, for tables of addresses."""

    def __init__(self, base: Tensor, element: torch.dtype) -> None:
        self.base, self.element = base, element

    def __add__(self, other: Any) -> Address:
        step = torch.as_tensor(_tensor(other)).long() * self.element.itemsize
        return Address(self.base + step, self.element)

    def __getitem__(self, place: Any) -> Address:
        return Address(self.base[place], self.element)

    def read(self, kept: Tensor) -> Tensor:
        base, kept = torch.broadcast_tensors(self.base, kept)
        found = torch.zeros(base.shape, dtype=self.element)
        if bool(kept.any()):
            places = base[kept]
            first, last = int(places.min()), int(places.max())
            # nothing of it is read but the places
            range_ = (ctypes.c_char * (last - first + self.element.itemsize)).from_address(first)
            memory = torch.frombuffer(range_, dtype=torch.uint8)
            step = torch.arange(self.element.itemsize)
            found[kept] = memory[(places - first)[:, None] + step].view(self.element).flatten()
        return found


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, Value) else value


class _Shared:
    def __init__(
        self, dtype: torch.dtype, shape: list[int], layout: Any, value: Value | None = None
    ) -> None:
        self.dtype, self.shape = dtype, shape
        if value is not None:
            self.fill(value)

    def fill(self, value: Value) -> None:
        assert value.dtype == self.dtype and list(value.tensor.shape) == self.shape
        self._value = value

    def permute(self, order: tuple[int, ...]) -> _Shared:
        moved = Value(self._value.tensor.permute(order))
        return _Shared(self.dtype, moved.shape, None, moved)

    def load(self, layout: Any) -> Value:
        return self._value


def _assembled(text: str, args: list[Tensor], half: torch.dtype) -> Any:
    first, *others = args
    if "prmt" in text:
        numbers = [first >> 4 * j & 15 for j in range(8)]
        if not others:
            return tuple((128 + number).to(half) for number in numbers)
        scale, centre = others
        return tuple((number - 8).to(half) * scale + centre for number in numbers)
    if "mov.b32 {" in text:
        return tuple(part.to(torch.int16).view(half) for part in (first, first >> 16))
    assert "cvt.rn.bf16x2.f32" in text and half == torch.bfloat16
    low, high = (value.to(half).view(torch.int16).int() for value in args)
    return low & 0xFFFF | high << 16


def _language(program: list[int], half: torch.dtype) -> types.ModuleType:
    gl: Any = types.ModuleType("triton.experimental.gluon.language")
    for name in ("float16", "float32", "int16", "int32", "int64"):
        setattr(gl, name, getattr(torch, name))
    gl.bfloat16 = half

    def places(at: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(_tensor(at.offset))
        kept = torch.as_tensor(True if mask is None else _tensor(mask))
        return torch.broadcast_tensors(offset, kept)

    def load(at: Any, mask: Any = None, other: float = 0, cache_modifier: str = "") -> Value:
        if isinstance(at, Address):
            assert other == 0
            return Value(at.read(torch.as_tensor(True if mask is None else _tensor(mask))))
        offset, kept = places(at, mask)
        found = at.memory.flatten()[torch.where(kept, offset, 0).long()]
        return Value(torch.where(kept, found, torch.tensor(other, dtype=found.dtype)))

    def store(at: Pointer, value: Value, mask: Any = None) -> None:
        offset, kept = places(at, mask)
        wanted = value.tensor.expand(offset.shape)
        assert wanted.dtype == at.memory.dtype
        at.memory.view(-1)[offset[kept].long()] = wanted[kept]

    def assembled(text: str, constraints: str, args: list[Value], **_: Any) -> Any:
        found = _assembled(text, [arg.tensor for arg in args], half)
        return tuple(map(Value, found)) if isinstance(found, tuple) else Value(found)

    def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
        def apply(*given: Any, **_: Any) -> Any:
            found = function(*map(_tensor, given))
            return tuple(map(Value, found)) if isinstance(found, tuple) else Value(found)

        return apply

    gl.load, gl.store, gl.inline_asm_elementwise = load, store, assembled
    gl.program_id = lambda dim: Value(torch.tensor(program[dim], dtype=torch.int32))
    gl.static_range = range
    gl.arange = lambda first, end, layout: Value(torch.arange(first, end, dtype=torch.int32))
    gl.zeros = lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype))
    gl.convert_layout = lambda value, layout, assert_trivial=False: value
    gl.allocate_shared_memory = _Shared
    gl.expand_dims, gl.reshape = on_tensors(torch.unsqueeze), on_tensors(torch.reshape)
    gl.permute, gl.sum = on_tensors(torch.permute), on_tensors(torch.sum)
    gl.exp, gl.rsqrt = on_tensors(torch.exp), on_tensors(torch.rsqrt)
    gl.join = on_tensors(lambda *both: torch.stack(torch.broadcast_tensors(*both), -1))
    gl.split = on_tensors(lambda both: both.unbind(-1))
    gl.where = on_tensors(torch.where)
    gl.broadcast = on_tensors(lambda *both: torch.broadcast_tensors(*both))
    gl.thread_barrier = lambda: None
    gl.pointer_type, gl.multiple_of = _PointerType, lambda value, _: value
    gl.maximum = on_tensors(lambda *both: torch.maximum(*map(torch.as_tensor, both)))
    gl.minimum = on_tensors(lambda *both: torch.minimum(*map(torch.as_tensor, both)))
    for name in (
        "DistributedLinearLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
        "BlockedLayout",
    ):
        setattr(gl, name, lambda *_: None)
    gl.SliceLayout = gl.SwizzledSharedLayout = lambda *_: None
    gl.constexpr = _same
    return gl


def _pointer(given: Any) -> Any:
    return Pointer(given) if isinstance(given, Tensor) else given


def _same(function: Any) -> Any:
    return function


@contextmanager
def _in_place_of(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def interpreted(module: Any, half: torch.dtype = torch.bfloat16) -> Any:
    """A copy of a module of Gluon kernels which run here; `half` stands for bf16."""
    program = [0, 0, 0]

    class Kernel:
        """A jitted function: `kernel[grid](...)` runs its programs, a call is part of another."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = function

        def __call__(self, *given: Any) -> Any:
            return self.function(*given)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*given: Any, **sizes: Any) -> None:
                del sizes["num_warps"]
                for place in product(*map(range, grid)):
                    program[: len(place)] = place
                    self.function(*map(_pointer, given), **sizes)

            return launch

    def jit(function: Any = None, **_: Any) -> Any:
        return Kernel if function is None else Kernel(function)

    language = _language(program, half)
    gluon: Any = types.ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language, gluon.__path__ = jit, language, []
    experimental: Any = types.ModuleType("triton.experimental")
    experimental.gluon = gluon
    ampere: Any = types.ModuleType(f"{language.__name__}.nvidia.ampere")

    def mma_v2(first: Value, second: Value, total: Value) -> Value:
        return Value(total.tensor + first.tensor.float() @ second.tensor.float())

    def copy(memory: _Shared, place: Any, mask: Any = None) -> None:
        memory.fill(language.load(place, mask))

    ampere.mma_v2 = mma_v2
    ampere.async_copy = types.SimpleNamespace(
        async_copy_global_to_shared=copy, commit_group=lambda: None, wait_group=lambda _: None
    )
    runtime: Any = types.ModuleType("triton.runtime.jit")
    runtime.constexpr_function = _same
    fakes = {module.__name__: module for module in (experimental, gluon, language, ampere, runtime)}
    spec = importlib.util.spec_from_file_location("interpreted", module.__file__)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with _in_place_of({**fakes, "interpreted": found}):
        spec.loader.exec_module(found)
    return found
