"""K and V of one layer under a policy: any kept set, each kv-head its own.

Knows slots, and how the tokens of a step attend one after another with evictions in between, so that the result does
not depend on how a text is cut into calls. Does not know transformers, other layers, or any rule: the policy is asked
after every token that brings a layer over its budget. The new token's K and V go into the slot that the last victim
left; attention does not care about the order of slots, because positions live in the keys' rotation.

Rows are the kv-heads of every conversation of a batch. What a policy is shown is the attention of the query heads of a
group together, over what the row holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import NDArray
from torch import Tensor

from headwater.cache.attention import attended, attention_weights
from headwater.cache.bank import Shape
from headwater.cache.turning import Turning
from headwater.errors import CacheStateError
from headwater.policies import Policy, Slots
from headwater.policies.incremental import drop, step

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(2),
    "sum": lambda weights: weights.sum(2),
    "max": lambda weights: weights.amax(2),
}
"""How the weights of the query heads of a group become those of their kv-head."""


class KeptLayer:
    """One layer: `keys` is `[batch, kv_heads, slots, key_dim]`, `values` likewise.

    `turning` is what closes the gaps between the positions of what is kept; None leaves every key at its distance.
    """

    def __init__(self, shape: Shape, policy: Policy[Any], *, batch: int, reduce: str, turning: Turning | None) -> None:
        self.shape, self.policy, self.rows = shape, policy, batch * shape.kv_heads
        self.turning = turning if shape.rotation is not None else None
        self._reduce = REDUCTIONS[reduce]
        self.slot_count = policy.budget + 1
        with torch.inference_mode(False):
            lead = (batch, shape.kv_heads, self.slot_count)
            self.keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)
            self.values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)
        empty = np.empty((self.rows, 0), dtype=np.int64)
        self.slots: Slots[Any] = Slots(positions=empty, state=policy.signal.fresh(empty))
        self.where = empty
        """The slot of every position held, in the order of `slots.positions`."""
        self.written = np.zeros((self.rows, self.slot_count), dtype=np.int64)
        """At which position, as the model counts them, the key in each slot was written."""
        self.seen = 0

    @property
    def held(self) -> int:
        return self.where.shape[1]

    @property
    def nbytes(self) -> int:
        """Physical bytes of K and V."""
        return sum(each.untyped_storage().nbytes() for each in (self.keys, self.values))

    def attend(
        self,
        query: Float[Tensor, "batch heads tokens dim"],
        keys: Shaped[Tensor, "batch kv_heads tokens dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
        first: int,
        *,
        scaling: float | None,
        softcap: float | None,
        sinks: Float[Tensor, " heads"] | None,
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        """Take the tokens in, in order, and return what each attended to: what was held before it, and itself.
        `first` is the position of the first of them, as the model counts."""
        if keys.dtype != self.keys.dtype or keys.device != self.keys.device or keys.shape[0] != self.keys.shape[0]:
            raise CacheStateError(
                f"the cache holds {self.keys.shape[0]} rows of {self.keys.dtype} on {self.keys.device} and was given "
                f"{keys.shape[0]} of {keys.dtype} on {keys.device}; reset() it, or make a new one after moving a model"
            )
        out, done, count = [], 0, query.shape[2]
        while done < count:
            taken = min(count - done, self.slot_count - self.held)
            part = slice(done, done + taken)
            self._write(keys[:, :, part], values[:, :, part], first + done)
            weights = self._weights(query[:, :, part], first + done, scaling=scaling, softcap=softcap, sinks=sinks)
            out.append(attended(weights, self.values[:, :, : weights.shape[-1]]))
            self._observe(weights)
            done += taken
        return (out[0] if len(out) == 1 else torch.cat(out, dim=2)).transpose(1, 2).contiguous()

    def _write(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Put tokens into free slots: behind the others while there is room, else where the last victims were."""
        count, held = keys.shape[2], self.held
        if held < self.slot_count - 1 or self.seen == held:
            new = np.broadcast_to(np.arange(held, held + count), (self.rows, count))
            self.keys[:, :, held : held + count] = keys
            self.values[:, :, held : held + count] = values
        else:  # one free slot a row
            new = (self.slot_count * (self.slot_count - 1) // 2 - self.where.sum(axis=1, keepdims=True)).astype(
                np.int64
            )
            at = torch.from_numpy(new).to(keys.device).view(*keys.shape[:2], 1, 1)
            self.keys.scatter_(2, at.expand_as(keys), keys)
            self.values.scatter_(2, at.expand_as(values), values)
        self.where = np.concatenate((self.where, new), axis=1)
        np.put_along_axis(self.written, new, np.arange(first, first + count)[None], axis=1)

    def _weights(self, query: Tensor, first: int, **how: Any) -> Float[Tensor, "batch heads tokens slots"]:
        """The weights of the newest tokens over all slots in use."""
        keys = self.keys[:, :, : self.held]
        if self.turning is not None:
            keys = self.turning.close(keys, self._shifts(first + query.shape[2] - 1))
        return attention_weights(query, keys, **how)

    def _shifts(self, last: int) -> NDArray[np.int64]:
        """How far the key in each slot in use has to turn, so that all lie one after another up to `last`."""
        wanted = np.empty((self.rows, self.held), dtype=np.int64)
        np.put_along_axis(wanted, self.where, np.arange(last - self.held + 1, last + 1)[None], axis=1)
        return wanted - self.written[:, : self.held]

    def _observe(self, weights: Float[Tensor, "batch heads tokens slots"]) -> None:
        """Show the policy what each of the newest tokens attended to, and let it evict."""
        batch, _, count, slots = weights.shape
        grouped = weights.view(batch, self.shape.kv_heads, -1, count, slots)
        shown = self._reduce(grouped).float().cpu().numpy().reshape(self.rows, count, slots)
        signal = self.policy.signal
        for index in range(count):
            before = self.slots.positions.shape[1]
            if signal.needs and before:
                given = np.take_along_axis(shown[:, index], self.where[:, :before], axis=1)
            else:
                given = None
            self.slots = step(signal, self.slots, self.seen, given)
            self.seen += 1
        if self.held > self.policy.budget:
            self._evict()

    def _evict(self) -> None:
        victims = self.policy.victims(self.slots, self.policy.budget)
        gone = int(victims[0].sum())
        self.slots = drop(self.policy.signal, self.slots, victims)
        self.where = self.where[~victims].reshape(self.rows, -1)
        if self.held > self.policy.budget:
            raise CacheStateError(f"{self.policy.name} left {self.held} tokens in a budget of {self.policy.budget}")
        if gone > 1:
            self._pack()

    def _pack(self) -> None:
        """Lay what is held into the first slots, in order: after several left at once."""
        for side in (self.keys, self.values):
            at = torch.from_numpy(self.where).to(side.device).view(*side.shape[:2], -1, 1)
            side[:, :, : self.held] = side.gather(2, at.expand(-1, -1, -1, side.shape[3]))
        self.written[:, : self.held] = np.take_along_axis(self.written, self.where, axis=1)
        self.where = np.broadcast_to(np.arange(self.held), self.where.shape).copy()

    def select(self, rows: Tensor) -> None:
        """Make conversation `i` of the batch what conversation `rows[i]` was."""
        heads = self.shape.kv_heads
        wanted = (rows.cpu().numpy()[:, None] * heads + np.arange(heads)).reshape(-1)
        with torch.inference_mode(False):
            self.keys = self.keys.index_select(0, rows.to(self.keys.device))
            self.values = self.values.index_select(0, rows.to(self.values.device))
        self.where, self.written, self.rows = self.where[wanted], self.written[wanted], len(wanted)
        self.slots = Slots(
            positions=self.slots.positions[wanted], state=self.policy.signal.select(self.slots.state, wanted)
        )
