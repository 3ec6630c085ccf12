"""The sliding window as a plain function on K and V.

Knows tensors of one layer. Does not know positions or models: keys are returned as they were rotated. For a running
model use `WindowCache`.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import BudgetError


def sliding_window(keys: Any, values: Any, window: int, sinks: int = 0) -> tuple[Any, Any]:
    """Keep the first `sinks` and the last `window` tokens.

    `keys` and `values` are `[batch, heads, tokens, head_dim]`, arrays of any library with indexing by lists. When
    everything fits they are returned as they are; otherwise the result owns its storage, so that the rest can be freed.
    Raises BudgetError when `window` is below 1 or `sinks` below 0, or when keys and values differ in tokens.
    """
    if window < 1:
        raise BudgetError(f"window must be at least 1 token, got {window}")
    if sinks < 0:
        raise BudgetError(f"sinks must be at least 0, got {sinks}")
    tokens = keys.shape[2]
    if values.shape[2] != tokens:
        raise BudgetError(f"keys hold {tokens} tokens and values {values.shape[2]}; they must be of the same layer")
    if tokens <= sinks + window:
        return keys, values
    kept = [*range(sinks), *range(tokens - window, tokens)]
    return keys[:, :, kept], values[:, :, kept]


def saved_fraction(before: Any, after: Any) -> float:
    """The share of bytes saved, 0 to 1: `before` and `after` are arrays, or tuples of arrays such as (keys, values)."""
    old, new = (sum(_bytes(array) for array in _arrays(side)) for side in (before, after))
    return 1 - new / old if old else 0.0


def _arrays(side: Any) -> tuple[Any, ...]:
    return tuple(side) if isinstance(side, tuple | list) else (side,)


def _bytes(array: Any) -> int:
    return int(array.nbytes)
