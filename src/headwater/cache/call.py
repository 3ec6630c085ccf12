"""What a call of the model asks of a cache, and which calls cannot work.

Knows the arguments of a transformers forward pass. Does not know the cache beyond how many tokens it has seen.
Everything here is checked before anything runs, because each of these calls would otherwise give wrong text without a
word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.errors import CacheStateError, UnsupportedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A forward pass that can work: `batch` rows of `count` new tokens; `positions` as the caller gave them."""

    batch: int
    count: int
    device: torch.device
    positions: Tensor | None


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any], *, seen: int) -> Call:
    """The call that these arguments make, for a cache that has seen `seen` tokens. Raises when it cannot work."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise UnsupportedCall("the model was called with neither input_ids nor inputs_embeds")
    batch, count = tokens.shape[:2]
    if batch == 0:
        raise UnsupportedCall("the batch has no rows; pass at least one")
    if count == 0:
        raise CacheStateError(
            f"no new tokens: the cache has seen {seen} tokens, and generate was given no more than that; pass the full "
            f"history with at least one new token, or reset() the cache"
        )
    _check_mask(kwargs.get("attention_mask"), seen, count)
    positions = kwargs.get("position_ids")
    _check_positions(positions, seen, count)
    return Call(batch=batch, count=count, device=tokens.device, positions=positions)


def _check_mask(mask: Any, seen: int, count: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UnsupportedCall("a WindowCache builds its own masks; pass a 2-D attention_mask of ones, or none")
    if mask.shape[1] != seen + count:
        raise CacheStateError(
            f"the attention_mask covers {mask.shape[1]} tokens, but the cache has seen {seen} and {count} are new; "
            f"pass a mask of {seen + count} (the whole history), or none, or reset() the cache"
        )
    if not bool(mask.all()):
        raise UnsupportedCall(
            "padded batches cannot work with a WindowCache: the mask has zeros; pass rows of equal length, one at a "
            "time where they differ"
        )


def _check_positions(positions: Tensor | None, seen: int, count: int) -> None:
    if positions is None:
        return
    if positions.ndim != 2:
        raise UnsupportedCall(f"position_ids must be [batch, tokens], got {positions.ndim} dimensions")
    if positions.device.type != "cpu" and count == 1:
        return  # reading them would make every step wait for the device; the mask's length says the same
    first, last = int(positions[:, 0].min()), int(positions[:, -1].max())
    if first != seen or last != seen + count - 1 or int(positions[:, 0].max()) != seen:
        raise CacheStateError(
            f"position_ids run from {first} to {last}, but the cache has seen {seen} tokens, so the {count} new ones "
            f"are at {seen} to {seen + count - 1}; pass the whole history to generate, or leave position_ids out"
        )
