"""Keys turned to where they lie when the gaps between them are closed.

Knows a rotation and a table of its angles. Does not know slots or policies. A key is turned once, from how it was
written, at every step: nothing drifts, and in half precision nothing is rounded twice. Pairs of dimensions turn as
complex numbers, which is one pass over the keys, so they lie side by side: keys are kept as `arrange` lays them, and
queries are laid so, too.
"""

from __future__ import annotations

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from headwater.rotary import Rotation


class Turning:
    """Shifts of one rotation on one device, up to `furthest` either way."""

    def __init__(self, rotation: Rotation, device: torch.device, furthest: int) -> None:
        self._rotation, self._device, self._furthest = rotation, device, 0
        self._first, self._second = rotation.slices()
        self.reach(furthest)

    def reach(self, furthest: int) -> None:
        """Have the angles of shifts as far as that."""
        if furthest > self._furthest:
            self._furthest = 2 * furthest
            angles = torch.as_tensor(self._rotation.angles(range(-self._furthest, self._furthest + 1)))
            self._table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(self._device)

    def close(
        self, keys: Shaped[Tensor, "batch kv_heads slots dim"], shifts: Int64[Tensor, "rows slots"]
    ) -> Shaped[Tensor, "batch kv_heads slots dim"]:
        """A copy of the keys, each turned by its shift; they are arranged. Rows are `batch * kv_heads`."""
        turned = self._table.index_select(0, shifts.reshape(-1) + self._furthest).view(*keys.shape[:3], -1)
        count = 2 * turned.shape[-1]
        turned.mul_(torch.view_as_complex(keys[..., :count].float().unflatten(-1, (-1, 2))))
        pairs = torch.view_as_real(turned).flatten(-2).to(keys.dtype)
        return pairs if count == keys.shape[-1] else torch.cat((pairs, keys[..., count:]), -1)

    def arrange(self, vectors: Shaped[Tensor, "batch heads tokens dim"]) -> Shaped[Tensor, "batch heads tokens dim"]:
        """The same keys or queries with the members of a pair side by side, before the dimensions that do not turn."""
        pairs = torch.stack((vectors[..., self._first], vectors[..., self._second]), -1).flatten(-2)
        start, count = self._rotation.start, pairs.shape[-1]
        if count == vectors.shape[-1]:
            return pairs
        return torch.cat((pairs, vectors[..., :start], vectors[..., start + count :]), -1)
