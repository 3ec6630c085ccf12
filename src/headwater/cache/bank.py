"""The tensors of a ring: K and V of all layers of one shape, in one buffer each.

Knows slots and rotations. Does not know positions or policies: it carries out what the ledger says. Layers with the
same shape, device, dtype and rotation share a bank, so an eviction is a few operations on the whole bank and not on
every layer. The pins' keys are kept a second time in float32, as they were written, and every re-indexing turns that
copy once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headwater.cache.ledger import Moves
from headwater.rotary import Rotation, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the layers of a bank have in common. `rotation` is None for layers without rotary embeddings."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    rotation: Rotation | None


def cosines(
    rotation: Rotation, shift: int | Sequence[int], device: torch.device
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Cosine and sine of the angles of a shift, float32: `[pairs]`, or `[shifts, pairs]` for several."""
    angles = torch.as_tensor(rotation.angles(shift))
    return angles.cos().float().to(device), angles.sin().float().to(device)


class Bank:
    """K and V of `layers` layers: `keys` is `[layers, batch, kv_heads, slots, key_dim]`, `values` likewise."""

    def __init__(self, shape: Shape, *, layers: int, batch: int, slots: int, pins: int) -> None:
        self.shape, self.pins = shape, pins
        # Buffers made in inference mode could not be written outside of it, and a cache outlives the mode.
        with torch.inference_mode(False):
            lead = (layers, batch, shape.kv_heads)
            self.keys = torch.zeros(*lead, slots, shape.key_dim, dtype=shape.dtype, device=shape.device)
            self.values = torch.zeros(*lead, slots, shape.value_dim, dtype=shape.dtype, device=shape.device)
            kept = pins if shape.rotation else 0
            self.pristine = torch.zeros(*lead, kept, shape.key_dim, dtype=torch.float32, device=shape.device)

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Physical bytes of the buffers."""
        return sum(t.untyped_storage().nbytes() for t in (self.keys, self.values, self.pristine))

    def write(
        self,
        layer: int,
        slot: int,
        keys: Shaped[Tensor, "batch kv_heads tokens key_dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
    ) -> None:
        """Put the tokens into the slots from `slot` on."""
        count = keys.shape[2]
        self.keys[layer].narrow(2, slot, count).copy_(keys)
        self.values[layer].narrow(2, slot, count).copy_(values)

    def view(
        self, layer: int, start: int, stop: int
    ) -> tuple[Shaped[Tensor, "batch kv_heads slots key_dim"], Shaped[Tensor, "batch kv_heads slots value_dim"]]:
        """K and V of the slots `[start, stop)`, without a copy."""
        return self.keys[layer][:, :, start:stop], self.values[layer][:, :, start:stop]

    def keep_pristine(self, start: int, stop: int) -> None:
        """Remember the keys of the pins `[start, stop)` as they are now."""
        if self.shape.rotation:
            self.pristine[..., start:stop, :] = self.keys[..., start:stop, :].float()

    def move(self, moves: Moves) -> None:
        """Copy slots onto slots."""
        if len(moves.source) == 1:  # the rule of the papers, at every step: plain indexing is twice as fast
            self.keys[..., moves.target[0], :] = self.keys[..., moves.source[0], :]
            self.values[..., moves.target[0], :] = self.values[..., moves.source[0], :]
        elif moves.source:
            source = torch.tensor(moves.source, device=self.keys.device)
            target = torch.tensor(moves.target, device=self.keys.device)
            self.keys.index_copy_(3, target, self.keys.index_select(3, source))
            self.values.index_copy_(3, target, self.values.index_select(3, source))

    def place_pins(self, shift: int) -> None:
        """Turn the pins' keys to `shift` positions after where they were written, from the pristine copy."""
        if self.shape.rotation and self.pins:
            cos, sin = cosines(self.shape.rotation, shift, self.shape.device)
            self.keys[..., : self.pins, :] = rotate(self.pristine, cos, sin, self.shape.rotation).to(self.shape.dtype)

    def pins_at(
        self, layer: int, shifts: Sequence[int]
    ) -> tuple[
        Shaped[Tensor, "batch kv_heads copies key_dim"],
        Shaped[Tensor, "batch kv_heads copies value_dim"],
    ]:
        """K and V of the pins once for every shift, one copy after the other; `copies` is shifts x pins."""
        count = len(shifts)
        keys, values = (side.repeat(1, 1, count, 1) for side in self.view(layer, 0, self.pins))
        if self.shape.rotation:
            cos, sin = cosines(self.shape.rotation, shifts, self.shape.device)
            written = self.pristine[layer][:, :, None].repeat(1, 1, count, 1, 1)
            turned = rotate(written, cos[:, None, :], sin[:, None, :], self.shape.rotation)
            keys = turned.flatten(2, 3).to(self.shape.dtype)
        return keys, values

    def turn_window(self, held: int, shift: int) -> None:
        """Turn the keys of the window's slots by `shift` positions, in float32, in place."""
        if self.shape.rotation and held > self.pins:
            cos, sin = cosines(self.shape.rotation, shift, self.shape.device)
            window = self.keys[..., self.pins : held, :]
            window.copy_(rotate(window.float(), cos, sin, self.shape.rotation))

    def select(self, rows: Tensor) -> None:
        """Make row `i` of the batch what row `rows[i]` was."""
        rows = rows.to(self.keys.device)
        with torch.inference_mode(False):
            self.keys = self.keys.index_select(1, rows)
            self.values = self.values.index_select(1, rows)
            self.pristine = self.pristine.index_select(1, rows)
