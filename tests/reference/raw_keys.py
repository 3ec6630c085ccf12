"""The slow twin of the ring: raw keys, all of them turned at every step.

The fast path (`headwater.cache.ring`)          This path
1. the model writes keys at growing positions   1. the model is always told position 0, so keys arrive raw
2. buffers of budget + 1 slots, in place        2. lists that grow, concatenated at every step
3. window keys never touched; pins turned       3. every key turned from raw to its place, at every step, as a
   from a pristine copy at an eviction             complex number in float64
4. positions rebased now and then               4. only distances to the query exist
5. an eviction closes holes in the slots        5. an eviction filters the list

Verified by `test_twin.py::test_the_twin_equals_a_masked_forward_pass`: without re-indexing, one forward pass of the
plain model over the whole text under a mask that shows every token its pins and its window gives the same logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headwater.cache.bank import Shape
from headwater.policies.window import Window
from headwater.rotary import Rotation


def turn(keys: Tensor, distances: list[int], rotation: Rotation | None) -> Tensor:
    """`keys` `[batch, heads, tokens, dim]`, each turned by its distance, as complex numbers in float64."""
    if rotation is None:
        return keys
    first, second = rotation.slices()
    pairs = torch.complex(keys[..., first].double(), keys[..., second].double())
    angles = torch.tensor(distances).double()[:, None] * torch.tensor(rotation.frequencies).double()
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    turned = keys.clone()
    turned[..., first], turned[..., second] = pairs.real.to(keys.dtype), pairs.imag.to(keys.dtype)
    return turned


class RawLayer(CacheLayerMixin):
    """One layer: everything it holds, raw, with its positions."""

    def __init__(self, rotation: Rotation | None, window: Window, *, slides: int | None, reindex: bool) -> None:
        super().__init__()
        self.rotation, self.window, self.slides, self.reindex = rotation, window, slides, reindex
        self.is_sliding = slides is not None
        self.seen = 0
        self.positions: list[int] = []
        self.kept: list[tuple[Tensor, Tensor]] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def forget(self) -> None:
        """Drop what the last step left over, by the rule of the papers' text."""
        drop: list[int] = []
        if self.slides is not None:
            drop = self.positions[: max(0, len(self.positions) - (self.slides - 1))]
        elif len(self.positions) > self.window.budget:
            unpinned = [p for p in self.positions if p >= self.window.pins]
            while len(self.positions) - len(drop) > self.window.budget:
                drop += unpinned[len(drop) : len(drop) + self.window.block]
        self.kept = [pair for pair, p in zip(self.kept, self.positions, strict=True) if p not in drop]
        self.positions = [p for p in self.positions if p not in drop]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.kept.append((key_states, value_states))
        self.positions.append(self.seen)
        self.seen += 1
        last = len(self.positions) - 1
        if self.slides is None and self.reindex:
            distances = [rank - last for rank in range(last + 1)]
        else:
            distances = [p - self.positions[-1] for p in self.positions]
        keys = torch.cat([k for k, _ in self.kept], dim=2)
        return turn(keys, distances, self.rotation), torch.cat([v for _, v in self.kept], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.forget()
        return len(self.positions) + query_length, self.seen - len(self.positions)

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1


class RawKeys(Cache):
    """The twin of a WindowCache, one token at a time; pass `position_ids` of zeros."""

    def __init__(self, shapes: list[Shape], slides: list[int | None], window: Window, *, reindex: bool = True) -> None:
        layers = [
            RawLayer(shape.rotation, window, slides=width, reindex=reindex)
            for shape, width in zip(shapes, slides, strict=True)
        ]
        super().__init__(layers=list(layers))
        self.raw = layers

    def run(self, model: Any, tokens: Tensor) -> Tensor:
        """Logits `[rows, tokens, vocab]` of feeding the tokens one at a time."""
        out: list[Tensor] = []
        zero = torch.zeros(1, 1, dtype=torch.long)
        with torch.inference_mode():
            for index in range(tokens.shape[1]):
                for layer in self.raw:
                    layer.forget()
                out.append(model(input_ids=tokens[:, index : index + 1], position_ids=zero, cache=self).logits)
        return torch.cat(out, dim=1)
