"""Keys turned to where they lie when the gaps between them are closed.

Knows a rotation and a table of its angles. Does not know slots or policies. A key is turned once, from how it was
written, at every step: nothing drifts, and in half precision nothing is rounded twice. Pairs of dimensions turn as
complex numbers, which is one pass over the keys; they come out in an order of their own, in which `arrange` puts the
queries, too.
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
        """A copy of the keys, arranged, each turned by its shift; rows are `batch * kv_heads`."""
        turns = self._table.index_select(0, shifts.reshape(-1) + self._furthest).view(*keys.shape[:3], -1)
        pairs = torch.complex(keys[..., self._first].float(), keys[..., self._second].float()).mul_(turns)
        return self._with_rest(torch.view_as_real(pairs), keys)

    def arrange(self, query: Shaped[Tensor, "batch heads tokens dim"]) -> Shaped[Tensor, "batch heads tokens dim"]:
        """The same vectors with their dimensions in the order of `close`."""
        return self._with_rest(torch.stack((query[..., self._first], query[..., self._second]), -1), query)

    def _with_rest(self, pairs: Tensor, whole: Tensor) -> Tensor:
        """Pairs as numbers, before the dimensions that do not turn."""
        turned = pairs.flatten(-2).to(whole.dtype)
        start, count = self._rotation.start, turned.shape[-1]
        if count == whole.shape[-1]:
            return turned
        return torch.cat((turned, whole[..., :start], whole[..., start + count :]), -1)
