"""The tensors of a quantised ring: int8 with a scale for every token and head, and a small part in full precision.

Knows slots, scales and rotations. A token of the window is known by its number in it: the first unpinned token of the
stream is 0, and what is held is always one run of numbers, so a quantised token's slot is its number modulo the slots
there are, and it never moves. Does not know the window, nor when a token is quantised: the ring says so, once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int8, Shaped
from torch import Tensor

from headwater.cache.bank import Shape, cosines
from headwater.rotary import rotate

LARGEST = 127
"""The largest number that a head's largest one becomes."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Vectors as int8; a vector is its `numbers` times its `scales`."""

    numbers: Int8[Tensor, "*lead dim"]
    scales: Float32[Tensor, "*lead 1"]

    def full(self, dtype: torch.dtype) -> Shaped[Tensor, "*lead dim"]:
        """The vectors again, within half a scale of what they were."""
        return (self.numbers * self.scales).to(dtype)


def quantise(vectors: Shaped[Tensor, "*lead dim"]) -> Quantised:
    """Each vector by a scale of its own, so that its largest number becomes 127 or -127."""
    full = vectors.float()
    scales = (full.abs().amax(-1, keepdim=True) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return Quantised((full / scales).round_().to(torch.int8), scales)


@dataclass(frozen=True, slots=True)
class Turn:
    """Keys of the numbers `[start, stop)` are to be turned by an angle whose cosines and sines are given."""

    start: int
    stop: int
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a step's tokens leave in a layer, of K or of V: pins and the newest as they are, and what ages at once."""

    exact: Shaped[Tensor, "*batch kv_heads kept dim"]
    aged: Quantised | None


def stacked(layers: Sequence[Fresh]) -> Fresh:
    """Of all layers of a bank, `[layers, batch, ...]`."""
    aged = [each.aged for each in layers if each.aged is not None]
    return Fresh(
        torch.stack([each.exact for each in layers]),
        Quantised(torch.stack([q.numbers for q in aged]), torch.stack([q.scales for q in aged])) if aged else None,
    )


def runs(start: int, stop: int, slots: int) -> Iterator[tuple[slice, slice]]:
    """Where the numbers `[start, stop)` lie in a ring of so many slots, and which of them lie there."""
    place = start
    while place < stop:
        slot = place % slots
        count = min(stop - place, slots - slot)
        yield slice(slot, slot + count), slice(place - start, place - start + count)
        place += count


class Side:
    """K or V of all layers of a bank. `numbers` is `[layers, batch, kv_heads, slots, dim]`, the rest likewise; `exact`
    holds the pins, and after them the newest tokens in their order."""

    def __init__(self, shape: Shape, dim: int, *, lead: tuple[int, int], slots: int, exact: int) -> None:
        heads = (*lead, shape.kv_heads)
        self.slots = slots
        self.numbers = torch.zeros(*heads, slots, dim, dtype=torch.int8, device=shape.device)
        self.scales = torch.zeros(*heads, slots, 1, dtype=torch.float32, device=shape.device)
        self.exact = torch.zeros(*heads, exact, dim, dtype=shape.dtype, device=shape.device)

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (self.numbers, self.scales, self.exact))

    def leave(self, slot: int, *, lost: int, aged: int, stay: int, number: int) -> None:
        """From a slot of `exact` on, so many tokens go for good, the next are quantised, of which the first has a
        number, and the rest moves up to the slot."""
        if aged:
            self._put(number, quantise(self.exact[..., slot + lost : slot + lost + aged, :]))
        if stay and lost + aged:
            start = slot + lost + aged
            self.exact[..., slot : slot + stay, :] = self.exact[..., start : start + stay, :].clone()

    def put(self, slot: int, number: int, fresh: Fresh) -> None:
        """Take in what a step left: from a slot of `exact` on, and from a number on."""
        self.exact[..., slot : slot + fresh.exact.shape[3], :] = fresh.exact
        if fresh.aged is not None:
            self._put(number, fresh.aged)

    def between(
        self,
        layer: int,
        before: Shaped[Tensor, "batch kv_heads before dim"],
        places: Sequence[tuple[slice, slice]],
        after: Shaped[Tensor, "batch kv_heads after dim"],
    ) -> Shaped[Tensor, "batch kv_heads slots dim"]:
        """The quantised tokens that lie in some places, in full precision, between what comes before and after them."""
        first = before.shape[2]
        count = places[-1][1].stop if places else 0
        out = after.new_empty(*after.shape[:2], first + count + after.shape[2], after.shape[3])
        out[:, :, :first] = before
        out[:, :, first + count :] = after
        for slots, part in places:
            target = out[:, :, first + part.start : first + part.stop]
            target.copy_(self.numbers[layer, :, :, slots]).mul_(self.scales[layer, :, :, slots])
        return out

    def select(self, rows: Tensor) -> None:
        """Make row `i` of the batch what row `rows[i]` was."""
        self.numbers = self.numbers.index_select(1, rows)
        self.scales = self.scales.index_select(1, rows)
        self.exact = self.exact.index_select(1, rows)

    def _put(self, number: int, aged: Quantised) -> None:
        for slots, part in runs(number, number + aged.numbers.shape[-2], self.slots):
            self.numbers[..., slots, :] = aged.numbers[..., part, :]
            self.scales[..., slots, :] = aged.scales[..., part, :]


class QuantisedBank:
    """K and V of `layers` layers; and the pins' keys a second time, in float32, as they were written."""

    def __init__(self, shape: Shape, *, layers: int, batch: int, slots: int, newest: int, pins: int) -> None:
        self.shape, self.pins = shape, pins
        # Buffers made in inference mode could not be written outside of it, and a cache outlives the mode.
        with torch.inference_mode(False):
            lead = (layers, batch)
            self.keys = Side(shape, shape.key_dim, lead=lead, slots=slots, exact=pins + newest)
            self.values = Side(shape, shape.value_dim, lead=lead, slots=slots, exact=pins + newest)
            kept = pins if shape.rotation else 0
            size = (layers, batch, shape.kv_heads, kept, shape.key_dim)
            self.pristine = torch.zeros(size, dtype=torch.float32, device=shape.device)

    @property
    def batch(self) -> int:
        return self.pristine.shape[1]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Physical bytes of the buffers."""
        return self.keys.nbytes + self.values.nbytes + self.pristine.untyped_storage().nbytes()

    def keep_pristine(self, start: int, stop: int) -> None:
        """Remember the keys of the pins `[start, stop)` as they are now."""
        if self.shape.rotation:
            self.pristine[..., start:stop, :] = self.keys.exact[..., start:stop, :].float()

    def place_pins(self, shift: int) -> None:
        """Turn the pins' keys to `shift` positions after where they were written, from the pristine copy."""
        if self.shape.rotation and self.pins:
            cos, sin = cosines(self.shape.rotation, shift, self.shape.device)
            self.keys.exact[..., : self.pins, :] = rotate(self.pristine, cos, sin, self.shape.rotation)

    def pinned_keys(self, layer: int, shifts: Sequence[int]) -> Shaped[Tensor, "batch kv_heads copies key_dim"]:
        """The pins' keys once for every shift, one copy after the other."""
        if not self.shape.rotation:
            return self.keys.exact[layer, :, :, : self.pins].repeat(1, 1, len(shifts), 1)
        cos, sin = cosines(self.shape.rotation, shifts, self.shape.device)
        written = self.pristine[layer][:, :, None].repeat(1, 1, len(shifts), 1, 1)
        turned = rotate(written, cos[:, None, :], sin[:, None, :], self.shape.rotation)
        return turned.flatten(2, 3).to(self.shape.dtype)

    def turn_newest(self, shift: int) -> None:
        """Turn the keys of the newest tokens by `shift` positions, in float32, in place."""
        if self.shape.rotation:
            cos, sin = cosines(self.shape.rotation, shift, self.shape.device)
            newest = self.keys.exact[..., self.pins :, :]
            newest.copy_(rotate(newest.float(), cos, sin, self.shape.rotation))

    def turn(self, keys: Tensor, turns: Sequence[Turn], first: int) -> None:
        """Turn those of the keys that need it, in place; `first` is the number of the first one."""
        if rotation := self.shape.rotation:
            for turn in turns:
                part = keys[:, :, turn.start - first : turn.stop - first]
                part.copy_(rotate(part.float(), turn.cos, turn.sin, rotation))

    def select(self, rows: Tensor) -> None:
        """Make row `i` of the batch what row `rows[i]` was."""
        rows = rows.to(self.shape.device)
        with torch.inference_mode(False):
            for side in self.sides:
                side.select(rows)
            self.pristine = self.pristine.index_select(1, rows)
