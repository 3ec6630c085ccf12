"""The keys and values of one layer in MLX, as mlx-lm's models want a cache to be.

Knows slots, their storage in full or in 8 bits, and how keys are turned. Does not know windows or which slots go. What
is held is one run of slots; new tokens come after it, so the plain causal mask is right for one token and for many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from headwater.errors import UnsupportedModel, UsageError
from headwater.rotary import Rotation, rotate

GROUPS = (64, 32)
"""Numbers that share a scale in 8 bits; the first that divides the heads of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer caches of a token. `rotation` is None where keys have no position."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    rotation: Rotation | None


class Cells(ABC):
    """One layer's cache. `offset` is the model's position of the next token, `held` how many slots are in use."""

    def __init__(self, shape: LayerShape, slots: int) -> None:
        self.shape = shape
        self.offset = self.held = 0
        self.pristine: mx.array | None = None
        """The pins' keys as they were written, in float32; None until they have to move."""
        self.keys = self._empty(shape.key_dim, slots)
        self.values = self._empty(shape.value_dim, slots)

    # As mlx-lm's models call it.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the new tokens after the held ones; all keys and values now held."""
        start, self.held = self.held, self.held + keys.shape[2]
        self.offset += keys.shape[2]
        for parts, new in ((self.keys, keys), (self.values, values)):
            for part, each in zip(parts, self._coded(new), strict=True):
                part[..., start : self.held, :] = each
        return self._shown(self.keys), self._shown(self.values)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Every token sees what is held and those before it."""
        if window_size is not None and self.held + count > window_size:
            raise UnsupportedModel(
                f"a layer of this model looks back {window_size} tokens only, and what is held here has no such order"
            )
        if count == 1 and not return_array:
            return None
        return create_causal_mask(count, self.held) if return_array else "causal"

    # As a stream calls it.

    def rewind(self, held: int, offset: int) -> None:
        """Forget what was written after a moment."""
        self.held, self.offset = held, offset

    def move(self, sources: Sequence[int], targets: Sequence[int], held: int) -> None:
        """Put the tokens of some slots into others; `held` slots are in use then."""
        if sources:
            start, stop = mx.array(list(sources)), mx.array(list(targets))
            for part in (*self.keys, *self.values):
                part[..., stop, :] = part[..., start, :]
        self.held = held

    def turn(self, start: int, by: int) -> None:
        """Turn the keys from slot `start` on by so many positions, once, in float32."""
        rotation = self.shape.rotation
        if rotation is not None and start < self.held:
            self._put(start, self._turned(self._plain(self.keys, start, self.held), by, rotation))

    def place_pins(self, pins: int, by: int) -> None:
        """Put the pins' keys where they belong, `by` positions after where they were written."""
        rotation = self.shape.rotation
        if rotation is None:
            return
        if self.pristine is None:
            self.pristine = mx.contiguous(self._plain(self.keys, 0, pins).astype(mx.float32))
        self._put(0, self._turned(self.pristine, by, rotation))

    def grow(self, slots: int) -> None:
        """Make it so many slots."""
        for parts, size in ((self.keys, self.shape.key_dim), (self.values, self.shape.value_dim)):
            wider = self._empty(size, slots)
            for index, part in enumerate(parts):
                wider[index][..., : self.held, :] = part[..., : self.held, :]
            parts[:] = wider

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that takes memory."""
        return [*self.keys, *self.values, *(() if self.pristine is None else (self.pristine,))]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def _put(self, start: int, keys: mx.array) -> None:
        for part, each in zip(self.keys, self._coded(keys), strict=True):
            part[..., start : start + keys.shape[2], :] = each

    def _turned(self, keys: mx.array, by: int, rotation: Rotation) -> mx.array:
        angles = rotation.angles(by)
        cos, sin = (mx.array(each(angles).astype(np.float32)) for each in (np.cos, np.sin))
        return rotate(keys.astype(mx.float32), cos, sin, rotation).astype(self.shape.dtype)

    @abstractmethod
    def _empty(self, size: int, slots: int) -> list[mx.array]:
        """Storage for so many slots of so many numbers a head."""

    @abstractmethod
    def _coded(self, numbers: mx.array) -> Sequence[mx.array]:
        """As they are stored."""

    @abstractmethod
    def _plain(self, parts: list[mx.array], start: int, stop: int) -> mx.array:
        """The numbers of some slots."""

    @abstractmethod
    def _shown(self, parts: list[mx.array]) -> Any:
        """What is held, as attention wants it."""


class PlainCells(Cells):
    """In the precision that the model computes in."""

    def _empty(self, size: int, slots: int) -> list[mx.array]:
        return [mx.zeros((1, self.shape.kv_heads, slots, size), dtype=self.shape.dtype)]

    def _coded(self, numbers: mx.array) -> Sequence[mx.array]:
        return [numbers]

    def _plain(self, parts: list[mx.array], start: int, stop: int) -> mx.array:
        return parts[0][..., start:stop, :]

    def _shown(self, parts: list[mx.array]) -> mx.array:
        return parts[0][..., : self.held, :]


class EightBitCells(Cells):
    """In 8 bits, with a scale and a least value for every group of numbers."""

    bits = 8
    """By this name mlx-lm knows that keys and values come in parts."""

    def __init__(self, shape: LayerShape, slots: int) -> None:
        """Raises UsageError for heads that no group divides."""
        sizes = (shape.key_dim, shape.value_dim)
        groups = [group for group in GROUPS if not any(size % group for size in sizes)]
        if not groups:
            raise UsageError(
                f"kv_bits 8 needs heads of a multiple of {GROUPS[-1]} numbers, and this model has heads of "
                f"{sizes[0]} and {sizes[1]}; leave kv_bits out"
            )
        self.group_size = groups[0]
        super().__init__(shape, slots)

    def _empty(self, size: int, slots: int) -> list[mx.array]:
        lead = (1, self.shape.kv_heads, slots)
        scales = (*lead, size // self.group_size)
        return [
            mx.zeros((*lead, size * self.bits // 32), dtype=mx.uint32),
            mx.zeros(scales, dtype=self.shape.dtype),
            mx.zeros(scales, dtype=self.shape.dtype),
        ]

    def _coded(self, numbers: mx.array) -> Sequence[mx.array]:
        return mx.quantize(numbers, group_size=self.group_size, bits=self.bits)

    def _plain(self, parts: list[mx.array], start: int, stop: int) -> mx.array:
        packed, scales, least = (part[..., start:stop, :] for part in parts)
        return mx.dequantize(packed, scales, least, group_size=self.group_size, bits=self.bits)

    def _shown(self, parts: list[mx.array]) -> tuple[mx.array, ...]:
        return tuple(part[..., : self.held, :] for part in parts)


CELLS: dict[int, type[Cells]] = {0: PlainCells, 8: EightBitCells}
"""By the number of bits that is asked for; 0 is the model's own precision."""
