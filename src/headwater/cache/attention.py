"""Softmax attention computed in full, its weights at hand.

Knows the variants that models ask for: grouped heads, a scale, a softcap, a mask, learned sinks. Does not know what the
weights are for.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def attention_weights(
    query: Float[Tensor, "batch heads tokens dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    mask: Tensor | None = None,
) -> Float[Tensor, "batch heads tokens keys"]:
    """The weights of every query over all keys, in float32 or better. A `mask` is added, or says what is seen where it
    is of booleans; without one, each of the queries sees what comes before it, the last one all.

    The query heads of a group share the keys of one kv-head, so they are laid side by side and nothing is repeated. A
    learned sink takes its share of the mass and is no key, so a row can add up to less than 1.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    scale = dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(batch, kv_heads, -1, dim)
    scores = (grouped @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores.view(batch, heads, tokens, keys)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    _hide(scores, mask)
    share = None
    if sinks is not None:
        share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.to(scores.dtype).view(1, -1, 1, 1))
    weights = torch.softmax(scores, -1, out=scores)
    return weights if share is None else weights.mul_(share)


def _hide(scores: Float[Tensor, "batch heads tokens keys"], mask: Tensor | None) -> None:
    """Hide what the mask hides, in place: only in the columns where it hides anything from anyone."""
    tokens, keys = scores.shape[-2:]
    if mask is None:
        if tokens == 1:
            return
        mask = scores.new_zeros(tokens, keys).masked_fill_(
            torch.ones(tokens, keys, dtype=torch.bool, device=scores.device).triu_(keys - tokens + 1), -torch.inf
        )[None, None]
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
    columns = mask.flatten(0, -2).any(0).nonzero()
    if len(columns):
        used = slice(int(columns[0]), int(columns[-1]) + 1)
        scores[..., used] += mask[..., used]


def attended(
    weights: Float[Tensor, "batch heads tokens keys"], value: Float[Tensor, "batch kv_heads keys value_dim"]
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """What the weights make of the values."""
    batch, heads, tokens, keys = weights.shape
    output = weights.view(batch, value.shape[1], -1, keys).to(value.dtype) @ value
    return output.view(batch, heads, tokens, -1)
