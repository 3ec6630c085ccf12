"""Keys turned to where they lie when the gaps between them are closed.

Knows a rotation and a table of its angles. Does not know slots or policies. A key is turned once, from how it was
written, at every step: nothing drifts, and in half precision nothing is rounded twice.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor

from headwater.cache.bank import cosines
from headwater.rotary import Rotation, rotate


class Turning:
    """Shifts of one rotation on one device."""

    def __init__(self, rotation: Rotation, device: torch.device, furthest: int) -> None:
        self._rotation, self._device = rotation, device
        self._furthest = 0
        self._grow(furthest)

    def _grow(self, furthest: int) -> None:
        self._furthest = furthest
        self._cos, self._sin = cosines(self._rotation, range(-furthest, furthest + 1), self._device)

    def close(
        self, keys: Shaped[Tensor, "batch kv_heads slots dim"], shifts: NDArray[np.int64]
    ) -> Shaped[Tensor, "batch kv_heads slots dim"]:
        """A copy of the keys, each turned by its shift; `shifts` is `[batch * kv_heads, slots]`."""
        if (most := int(np.abs(shifts).max(initial=0))) > self._furthest:
            self._grow(2 * most)
        at = torch.from_numpy(shifts + self._furthest).to(self._device).view(keys.shape[:3])
        return rotate(keys.float(), self._cos[at], self._sin[at], self._rotation).to(keys.dtype)
