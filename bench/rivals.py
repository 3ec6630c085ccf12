"""What the ring is measured against: the two usual ways of keeping a window, written plainly and without waste.

Each holds `pins + recent` tokens a layer and takes one token a step. Both do their whole step in torch on the same
shapes as the ring, and both return all that the token attends to.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ConcatAndSlice:
    """Keep the pins and the newest tokens with one concatenation a layer and step, as sliding caches usually do."""

    def __init__(self, layers: int, shape: tuple[int, int, int], pins: int, recent: int) -> None:
        batch, heads, dim = shape
        self.pins, self.recent = pins, recent
        self.keys = [torch.zeros(batch, heads, pins + recent, dim) for _ in range(layers)]
        self.values = [torch.zeros(batch, heads, pins + recent, dim) for _ in range(layers)]

    def step(self, keys: Tensor, values: Tensor) -> None:
        pins = self.pins
        for layer in range(len(self.keys)):
            k, v = self.keys[layer], self.values[layer]
            self.keys[layer] = torch.cat((k[:, :, :pins], k[:, :, pins + 1 :], keys), dim=2)
            self.values[layer] = torch.cat((v[:, :, :pins], v[:, :, pins + 1 :], values), dim=2)


class RotateAll(ConcatAndSlice):
    """Keep raw keys and turn the whole window at every step, as the StreamingLLM reference does.

    Cosines and sines of all places are made once, since the places never change.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int], pins: int, recent: int) -> None:
        super().__init__(layers, shape, pins, recent)
        dim = shape[2]
        frequencies = 100_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(pins + recent).float()[:, None] * frequencies
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def step(self, keys: Tensor, values: Tensor) -> None:
        super().step(keys, values)
        for raw in self.keys:
            half = raw.shape[-1] // 2
            swapped = torch.cat((-raw[..., half:], raw[..., :half]), dim=-1)
            self.returned = raw * self.cos + swapped * self.sin
