"""The C interface of llama.cpp, as a library that was found, measured and then trusted.

Knows where a build of llama.cpp may lie, the two structures that are passed by value, and how their layout is proved
before anything is built on it. Does not know models, conversations or text.

`llama.h` promises nothing about its structures: fields came and went between builds a few weeks apart. So every known
layout is compared with what the library itself writes as its defaults, in extent and field by field, and a library that
fits none is refused. A field added behind ours does no harm: the defaults travel along in `RESERVE`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwater.errors import MissingExtra, UnsupportedVersion

LIBRARY_VARIABLE = "HEADWATER_LLAMA_LIBRARY"
"""Names a library of the user's own: a `libllama` with its symbols."""

PACKAGE = "xllamacpp"
TESTED_PACKAGE = "2026.10.11549"
"""The release of the package that the tests run with."""

INSTALL = "pip install 'headwater[llamacpp]'"
LOADED: list[str] = []
"""Versions of the libraries that this process has opened, the latest last."""

RESERVE = 256
"""Bytes behind the known fields of a structure, for fields that a newer library has."""

_MEASURED = 1024
_FILLS = (0xA5, 0x5A)


class ModelParams(Structure):
    """`llama_model_params`."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


_CONTEXT_HEAD = (
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int),
    ("rope_scaling_type", c_int),
    ("pooling_type", c_int),
    ("attention_type", c_int),
    ("flash_attn_type", c_int),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int),
    ("type_v", c_int),
)
_CONTEXT_TAIL = (
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
)


class ContextParams(Structure):
    """`llama_context_params` since `moe_cache_size` came in October 2026."""

    _fields_ = (*_CONTEXT_HEAD, ("moe_cache_size", c_size_t), *_CONTEXT_TAIL)


class EarlierContextParams(Structure):
    """The same in the weeks before."""

    _fields_ = (*_CONTEXT_HEAD, *_CONTEXT_TAIL)


MODEL_LAYOUTS: tuple[type[Structure], ...] = (ModelParams,)
CONTEXT_LAYOUTS: tuple[type[Structure], ...] = (ContextParams, EarlierContextParams)

MODEL_DEFAULTS: Mapping[str, Any] = {
    "devices": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
}
CONTEXT_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}
"""What the library must write as its defaults: a field at another place shows at once."""


class Batch(Structure):
    """`llama_batch`, the same for years."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_version": (c_char_p, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_rope_type": (c_int, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_head_kv": (c_int32, (c_void_p,)),
    "llama_model_n_swa": (c_int32, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_has_decoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_is_diffusion": (c_bool, (c_void_p,)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_type": (c_int, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ubatch": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_n_threads": (c_int32, (c_void_p,)),
    "llama_n_threads_batch": (c_int32, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_get_logits_ith": (c_void_p, (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "ggml_row_size": (c_size_t, (c_int, ctypes.c_int64)),
}
"""What is called, with results and arguments; all of it is plain numbers and pointers."""

_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_AbortCallback = ctypes.CFUNCTYPE(None, c_char_p)
_ERROR, _CONTINUED = 4, 5


class Log:
    """What the library complained about lately; it would write to the terminal otherwise."""

    def __init__(self, keep: int = 20) -> None:
        self._lines: deque[str] = deque(maxlen=keep)
        self._level = 0
        self.callback = _LogCallback(self._take)

    def _take(self, level: int, text: bytes, data: object) -> None:
        self._level = level if level != _CONTINUED else self._level
        said = text.decode(errors="replace").strip()
        if self._level == _ERROR and said:
            self._lines.append(said)

    def clear(self) -> None:
        """Forget what was said before."""
        self._lines.clear()

    def reason(self) -> str:
        """The first complaint since `clear`, without the function that made it."""
        lines = [line for line in self._lines if not line.startswith("llama_model_load: error loading model: error")]
        if not lines:
            return "llama.cpp gave no reason"
        first = lines[0]
        for mark in (
            "error loading model: ",
            "error loading model vocabulary: ",
            "error loading model hyperparameters: ",
        ):
            first = first.rpartition(mark)[2]
        head, colon, rest = first.partition(": ")
        return rest if colon and head.replace("_", "").isalnum() and " " not in head else first


def _say_why(reason: bytes) -> None:
    """The last words of this process: after them llama.cpp ends it."""
    said = reason.decode(errors="replace").strip()
    text = (
        f"headwater: llama.cpp ends this process: {said}\n"
        "what was said in a session is on the disk up to the last whole message; open it again\n"
    )
    os.write(2, text.encode())


_ABORT = _AbortCallback(_say_why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library whose layouts are known: `call` holds its functions by their names."""

    path: Path
    version: str
    call: Any
    model_params: type[Structure]
    context_params: type[Structure]
    log: Log
    lock: threading.RLock
    """Held while a model is loaded: the complaints of two loads would mix."""


def library() -> Library:
    """The library named by `HEADWATER_LLAMA_LIBRARY`, or the one of the installed package.

    Raises MissingExtra when there is none, UnsupportedVersion when it cannot be trusted.
    """
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return _opened(Path(given).expanduser(), "")
    _check_package()
    return _opened(_package_library(), f" ({PACKAGE} {TESTED_PACKAGE})")


def installed() -> str | None:
    """What `library` would open, in words; None when there is nothing. Opens nothing."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return given
    try:
        return f"{PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return None


def _check_package() -> None:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise MissingExtra(f"{PACKAGE}, which brings llama.cpp,", "llamacpp") from None
    if found != TESTED_PACKAGE:
        raise UnsupportedVersion(
            f"{PACKAGE} {found} is installed, and only {TESTED_PACKAGE} was tested: its structures may lie otherwise; "
            f"run: {INSTALL}, or name a libllama of your own in {LIBRARY_VARIABLE}"
        )


def _package_library() -> Path:
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for folder in folders for path in _libraries(Path(folder))]
    if not found:
        raise UnsupportedVersion(f"{PACKAGE} is installed without its library; run: {INSTALL} --force-reinstall")
    return found[0]


def _libraries(folder: Path) -> Iterator[Path]:
    for pattern in ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib"):
        yield from sorted(folder.glob(pattern))


@cache
def _opened(path: Path, package: str) -> Library:
    """One library of a path in a process, however often it is asked for. `package` goes with its version."""
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedVersion(f"{path} cannot be loaded as a library: {error}") from error
    missing = [name for name in (*_FUNCTIONS, *_BY_VALUE) if not hasattr(lib, name)]
    if missing:
        raise UnsupportedVersion(
            f"{path} is no llama.cpp that Headwater can drive: it lacks {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}; tested is {PACKAGE} {TESTED_PACKAGE}"
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    said = lib.llama_version().decode() + package
    model = _layout(lib, "llama_model_default_params", MODEL_LAYOUTS, MODEL_DEFAULTS, path, said)
    context = _layout(lib, "llama_context_default_params", CONTEXT_LAYOUTS, CONTEXT_DEFAULTS, path, said)
    lib.llama_model_default_params.restype, lib.llama_context_default_params.restype = model, context
    load, start = lib.llama_model_load_from_file, lib.llama_init_from_model
    load.restype, load.argtypes = c_void_p, (c_char_p, model)
    start.restype, start.argtypes = c_void_p, (c_void_p, context)
    log = Log()
    lib.llama_log_set(log.callback, None)
    if hasattr(lib, "ggml_set_abort_callback"):
        lib.ggml_set_abort_callback.restype, lib.ggml_set_abort_callback.argtypes = c_void_p, (c_void_p,)
        lib.ggml_set_abort_callback(_ABORT)
    lib.llama_backend_init()
    LOADED.append(said)
    return Library(
        path=path,
        version=said,
        call=lib,
        model_params=model,
        context_params=context,
        log=log,
        lock=threading.RLock(),
    )


_BY_VALUE = (
    "llama_model_default_params",
    "llama_context_default_params",
    "llama_model_load_from_file",
    "llama_init_from_model",
)


def _layout(
    lib: Any, name: str, layouts: tuple[type[Structure], ...], defaults: Mapping[str, Any], path: Path, said: str
) -> type[Structure]:
    """The layout that this library writes its defaults in, with room behind it. Raises UnsupportedVersion for none."""
    extent = _extent(lib, name)
    for layout in layouts:
        fits = extent is None or ctypes.sizeof(layout) - 8 < extent <= ctypes.sizeof(layout)
        roomy = _with_reserve(layout)
        getattr(lib, name).restype = roomy
        written = getattr(lib, name)()
        if fits and all(getattr(written, field) == value for field, value in defaults.items()):
            return roomy
    raise UnsupportedVersion(
        f"{path} is llama.cpp {said}, whose {name.removesuffix('_default_params')}_params Headwater does not know"
        f"{'' if extent is None else f' ({extent} bytes)'}; tested is {PACKAGE} {TESTED_PACKAGE}: {INSTALL}"
    )


def _extent(lib: Any, name: str) -> int | None:
    """How many bytes the library writes for a structure; None where results do not come through a hidden pointer.

    On x86-64 a structure this large is written to where the first argument points.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    write = ctypes.CFUNCTYPE(None, c_void_p)(ctypes.cast(getattr(lib, name), c_void_p).value or 0)
    extent = 0
    for fill in _FILLS:
        memory = (ctypes.c_ubyte * _MEASURED)(*[fill] * _MEASURED)
        write(ctypes.addressof(memory))
        extent = max(extent, 1 + max((index for index in range(_MEASURED) if memory[index] != fill), default=-1))
    return extent


@cache
def _with_reserve(layout: type[Structure]) -> type[Structure]:
    return type(f"Roomy{layout.__name__}", (layout,), {"_fields_": (("reserve", ctypes.c_ubyte * RESERVE),)})
