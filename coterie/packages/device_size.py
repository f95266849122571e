"""How many bytes an adapter may take beside a model, told from its file's header. No torch.

An upper bound that adds up over a stack: whatever the file's own type, an engine may need fp32.
"""

from __future__ import annotations

import math
from pathlib import Path

from coterie.packages.safetensors_header import check_header, header_length

# tensors lie at multiples of the one, stacks at multiples of the other (adapters/image.py, slab.py)
_TENSOR_ALIGN, _STACK_ALIGN = 64, 256
_WIDEST_BYTES = 4
# what PEFT writes beside the adapter of a head: the base's own weight, which is not loaded
_BASE = ".base_layer.weight"
# a scale of a module's output may bring a shift of the same length along
_SCALES = (".ia3_l", ".lora_magnitude_vector")


def device_bytes(weights: Path) -> int:
    size = weights.stat().st_size
    with weights.open("rb") as file:
        length = header_length(file.read(8), size, str(weights))
        header = file.read(length)
    total = 0
    for name, facts in check_header(header, size, str(weights)).items():
        if not name.endswith(_BASE):
            nbytes = _WIDEST_BYTES * math.prod(facts["shape"])
            total += _up(nbytes, _TENSOR_ALIGN) * (2 if name.endswith(_SCALES) else 1)
    return _up(total, _STACK_ALIGN)


def _up(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
