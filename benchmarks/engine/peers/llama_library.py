"""The few calls of llama.cpp's C interface that the benchmark needs, as of its release 0.5.0.

Parameter structs are passed by value: they are declared by the fields that are set here, which come first, and room
for all that may follow, which keeps its defaults.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_ubyte, c_uint32, c_void_p
from pathlib import Path

_ROOM = 512


class ModelParams(ctypes.Structure):
    _fields_ = (("room", c_ubyte * _ROOM),)


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("room", c_ubyte * _ROOM),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_CALLS: dict[str, tuple[object, tuple[object, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_context_default_params": (ContextParams, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_print_system_info": (c_char_p, ()),
}


def load(folder: Path, variant: str | None) -> ctypes.CDLL:
    """libllama of `folder`, with the build of its kernels that fits this CPU best, or the one named `variant`."""
    library = ctypes.CDLL(str(next(folder.glob("libllama.v*.so"))))
    for name, (result, arguments) in _CALLS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    kernels = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))))
    if variant is None:
        kernels.ggml_backend_load_all_from_path(str(folder).encode())
    else:
        kernels.ggml_backend_load.restype = c_void_p
        if not kernels.ggml_backend_load(str(folder / f"libggml-cpu-{variant}.so").encode()):
            raise SystemExit(f"no kernels {variant!r} in {folder}")
    library.llama_backend_init()
    return library
