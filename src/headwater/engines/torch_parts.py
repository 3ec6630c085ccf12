"""Between torch and a snapshot: tensors as arrays and back, and what tells one model from another.

Knows torch. Does not know caches or files.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.engines.base import ModelFacts
from headwater.engines.snapshot import Part
from headwater.errors import UnsupportedCall

SAMPLED = 1024
"""How many numbers of a tensor of weights go into a fingerprint."""

_ELSEWHERE = frozenset(
    {"architectures", "dtype", "transformers_version", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)
"""Facts of a configuration that change with how a model was loaded or is called, and not with what it computes."""

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
_NAMES |= {torch.float64: "F64", torch.int32: "I32", torch.int8: "I8"}


def as_part(tensor: Tensor) -> Part:
    """A tensor on the host as a part of a snapshot; they share memory."""
    if tensor.dtype not in _NAMES:
        raise UnsupportedCall(f"a cache of {tensor.dtype} cannot be saved; take float32, bfloat16 or float16")
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return Part(dtype=_NAMES[tensor.dtype], array=bits.numpy())


def as_tensor(array: NDArray[Any], dtype: str) -> Tensor:
    """The tensor of an array of a snapshot; they share memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "BF16" else tensor


@torch.inference_mode()
def model_fingerprint(model: Any, facts: ModelFacts, kv_dtype: str | None = None) -> str:
    """A sha256 over the configuration, the tokenizer, what K and V are kept as (None: as they are made), and every
    tensor's name, shape, precision and a sample of `SAMPLED` of its numbers, evenly spread. Weights that differ only
    between the samples are not told apart."""
    config = {
        key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key not in _ELSEWHERE
    }
    known = [facts.architecture, facts.precision, facts.tokenizer_sha256, config]
    known += [] if kv_dtype is None else [kv_dtype]
    seal = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED)
        sample = flat[::step].cpu().contiguous()
        seal.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        seal.update(np.ascontiguousarray(sample.view(torch.uint8).numpy()).data)
    return seal.hexdigest()
