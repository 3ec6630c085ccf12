"""What a model does to its keys, measured once when a cache is attached.

Knows how to run one token through a model at several positions and to read the keys it caches. Does not know families
by name: each layer's rotation is the candidate (frequencies of the model's own buffers; pairs laid in halves or
interleaved, at the head's front or tail; or none) that turns the key cached at position p into the one cached at p +
d. With a single token attention has nothing to mix, so nothing else depends on the position. A layer that no
candidate explains makes the model unsupported, with the layer and the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from headwater.cache.bank import Shape, cosines
from headwater.errors import UnsupportedModel
from headwater.rotary import Layout, Rotation, rotate

SHIFTS = (3, 57)
"""How far the probe moves a key: far enough to tell two rotary bases apart, short enough for the smallest model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """What the model's rotary modules say of themselves."""

    frequencies: tuple[tuple[float, ...], ...]
    """One entry a set of frequencies found in the model's buffers."""
    last_position: int | None
    """Where frequencies would change (dynamic NTK, LongRoPE): positions must stay below. None when they never do."""


def read_rope(base: nn.Module) -> Rope:
    """The frequencies and limits of every rotary module inside `base`."""
    found: dict[tuple[float, ...], None] = {}
    limits: list[int] = []
    for module in base.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                found[tuple(buffer.detach().float().cpu().tolist())] = None
        limits.extend(_limits(module))
    return Rope(frequencies=tuple(found), last_position=min(limits, default=None))


def _limits(module: nn.Module) -> Iterator[int]:
    kinds = getattr(module, "rope_type", None)
    config = getattr(module, "config", None)
    if kinds is None or config is None:
        return
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        if "dynamic" in kind:
            yield int(config.max_position_embeddings)
        elif kind == "longrope":
            parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
            yield int(parameters["original_max_position_embeddings"])


def probe_inputs(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions `[rows, 1]`: two tokens, each at the positions 1, and 1 moved by each of SHIFTS."""
    positions = torch.tensor([1, *(1 + shift for shift in SHIFTS)], device=device)
    tokens = torch.tensor([vocab_size // 3, vocab_size // 2], device=device)
    return tokens.repeat_interleave(len(positions))[:, None], positions.repeat(len(tokens))[:, None]


def identify(
    layer: int,
    keys: Shaped[Tensor, "rows kv_heads 1 key_dim"],
    values: Shaped[Tensor, "rows kv_heads 1 value_dim"],
    rope: Rope,
) -> Shape:
    """The shape of a layer whose probed keys and values are given. Raises UnsupportedModel when nothing explains
    them."""
    places = 1 + len(SHIFTS)
    seen = keys.detach().float().reshape(-1, places, *keys.shape[1:])
    scale = seen.abs().max().item()
    if scale == 0:
        raise UnsupportedModel(f"layer {layer} caches keys that are all zero, so its rotation cannot be measured")
    tolerance = max(1e-4, 4 * torch.finfo(keys.dtype).eps) * scale
    errors = {rotation: _error(seen, rotation) for rotation in _candidates(rope, keys.shape[-1])}
    best = min(errors, key=lambda rotation: errors[rotation])
    if errors[best] > tolerance:
        raise UnsupportedModel(
            f"layer {layer} moves its keys in a way that no known rotation explains: after a shift by {SHIFTS[-1]} "
            f"positions the best one is off by {errors[best]:.3g}, allowed is {tolerance:.3g}; the positions cannot be "
            f"re-indexed"
        )
    return Shape(
        kv_heads=keys.shape[1],
        key_dim=keys.shape[-1],
        value_dim=values.shape[-1],
        dtype=keys.dtype,
        device=keys.device,
        rotation=best,
    )


def _candidates(rope: Rope, head_dim: int) -> Iterator[Rotation | None]:
    yield None
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    for frequencies in rope.frequencies:
        width = 2 * len(frequencies)
        if width <= head_dim:
            for layout in layouts:
                for start in dict.fromkeys((0, head_dim - width)):
                    yield Rotation(frequencies=frequencies, layout=layout, start=start)


def _error(seen: Shaped[Tensor, "tokens places kv_heads 1 key_dim"], rotation: Rotation | None) -> float:
    """Largest difference between the keys at the moved places and the key at the first place, moved by us."""
    origin, moved = seen[:, :1], seen[:, 1:]
    if rotation is not None:
        cos, sin = cosines(rotation, SHIFTS, seen.device)
        origin = rotate(origin.repeat(1, len(SHIFTS), 1, 1, 1), cos[:, None, None], sin[:, None, None], rotation)
    return (origin - moved).abs().max().item()
