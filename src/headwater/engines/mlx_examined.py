"""What a model of mlx-lm caches, and how it turns its keys: measured on two tokens when it is loaded.

Knows how to run one token at several positions and to read the keys it caches. Does not know families by name: a
layer's rotation is the candidate (frequencies of the model's own rotary modules, pairs in halves or interleaved, at the
head's front or tail; or none) that turns the key cached at one position into the one cached at another. With a single
token attention has nothing to mix, so nothing else depends on the position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

from headwater.engines.mlx_cells import LayerShape
from headwater.errors import UnsupportedModel
from headwater.rotary import Layout, Rotation, rotate

FIRST, SHIFTS = 1, (3, 57)
"""Where the keys are read: at the first place, and moved by each of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """`refusal` says why streams of this model cannot evict."""

    layers: tuple[LayerShape, ...]
    refusal: str | None


class _Reading:
    """A cache that keeps the keys of one token and nothing else."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys = self.values = mx.zeros(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return create_causal_mask(count, 0) if return_array else None


def examine(model: Any, name: str, vocab_size: int) -> Examined:
    """Try it out. Raises UnsupportedModel for layers that keep something else than keys and values of every token."""
    _check_layers(make_prompt_cache(model), name)
    places = (FIRST, *(FIRST + shift for shift in SHIFTS))
    tokens = (vocab_size // 3, vocab_size // 2)
    read = [[_read(model, token, place) for place in places] for token in tokens]
    layers, reasons = list[LayerShape](), list[str]()
    if any(type(module).__name__.startswith("Dynamic") for _, module in model.named_modules()):
        reasons.append(f"{name} changes its rotation with the length of the text (dynamic)")
    candidates = list(_frequencies(model))
    for index, first in enumerate(read[0][0]):
        keys = np.stack([[_numpy(place[index].keys) for place in token] for token in read])
        rotation, error, allowed = _best(keys, candidates, first.keys.dtype)
        if error > allowed:
            reasons.append(
                f"layer {index} of {name} moves its keys in a way that no known rotation explains: the best one is off "
                f"by {error:.3g} after {SHIFTS[-1]} positions, allowed is {allowed:.3g}"
            )
        layers.append(
            LayerShape(
                kv_heads=first.keys.shape[1],
                key_dim=first.keys.shape[-1],
                value_dim=first.values.shape[-1],
                dtype=first.keys.dtype,
                rotation=rotation,
            )
        )
    if not reasons and all(layer.rotation is None for layer in layers):
        reasons.append(f"{name} has no rotary positions, and others cannot be moved here")
    return Examined(layers=tuple(layers), refusal=reasons[0] if reasons else None)


def require_eviction(examined: Examined) -> None:
    """Raise UnsupportedModel where streams cannot evict."""
    if examined.refusal is not None:
        raise UnsupportedModel(
            f"{examined.refusal}, so nothing can leave its cache here; take the policy full, or the transformers engine"
        )


def _check_layers(caches: list[Any], name: str) -> None:
    kinds = [type(cache).__name__ for cache in caches]
    if others := [kind for cache, kind in zip(caches, kinds, strict=True) if type(cache) is not KVCache]:
        where = ", ".join(str(index) for index, kind in enumerate(kinds) if kind == others[0])
        raise UnsupportedModel(
            f"layers {where} of {name} keep a {others[0]} of mlx-lm's own, not the keys and values of every token; "
            "take another model, or the transformers engine"
        )


def _read(model: Any, token: int, place: int) -> list[_Reading]:
    caches = [_Reading(place) for _ in model.layers]
    model(mx.array([[token]]), cache=caches)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    return caches


def _numpy(array: mx.array) -> NDArray[np.float32]:
    return np.array(array.astype(mx.float32))[0, :, 0]


def _frequencies(model: Any) -> Iterator[tuple[float, ...]]:
    """Radians per position of every rotary module, each set once."""
    found: dict[tuple[float, ...], None] = {}
    for _, module in model.named_modules():
        own = getattr(module, "_freqs", None)
        if own is not None:  # mlx counts positions per radian
            with np.errstate(divide="ignore"):
                found[tuple((1.0 / np.array(own, dtype=np.float64)).tolist())] = None
        elif isinstance(module, nn.RoPE):
            pairs = np.arange(0, module.dims, 2, dtype=np.float64) / module.dims
            found[tuple((module.scale * module.base**-pairs).tolist())] = None
    yield from found


def _best(
    keys: NDArray[np.float32], candidates: list[tuple[float, ...]], dtype: Any
) -> tuple[Rotation | None, float, float]:
    """The rotation that explains keys `[tokens, places, heads, dim]` best, by how much it is off, and what is
    allowed."""
    scale = float(np.abs(keys).max())
    allowed = max(1e-4, 4 * float(mx.finfo(dtype).eps)) * scale
    errors = {rotation: _error(keys, rotation) for rotation in _rotations(candidates, keys.shape[-1])}
    best = min(errors, key=lambda rotation: errors[rotation])
    return best, errors[best], allowed if scale else -1.0


def _rotations(candidates: list[tuple[float, ...]], head_dim: int) -> Iterator[Rotation | None]:
    yield None
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    for frequencies in candidates:
        width = 2 * len(frequencies)
        if width <= head_dim:
            for layout in layouts:
                for start in dict.fromkeys((0, head_dim - width)):
                    yield Rotation(frequencies=frequencies, layout=layout, start=start)


def _error(keys: NDArray[np.float32], rotation: Rotation | None) -> float:
    origin, moved = keys[:, :1].repeat(len(SHIFTS), axis=1), keys[:, 1:]
    if rotation is not None:
        angles = rotation.angles(SHIFTS)[:, None]
        origin = rotate(origin, np.cos(angles), np.sin(angles), rotation)
    return float(np.abs(origin - moved).max())
