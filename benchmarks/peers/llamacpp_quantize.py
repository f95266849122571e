"""llama.cpp's own quantiser. Arguments: GGUF file, file to write, mix (such as Q4_K_M), threads.

A file that is quantised already is quantised again: a speed anchor, not a quality anchor.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as ll


def quantise(source: str, target: str, mix: str, threads: int) -> None:
    parameters = ll.llama_model_quantize_default_params()
    parameters.ftype = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{mix}")
    parameters.nthread = threads
    parameters.allow_requantize = True
    if ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)) != 0:
        raise SystemExit(f"llama.cpp cannot make {mix} of {source}")


quantise(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
