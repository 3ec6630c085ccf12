"""K and V of layers under a policy: any kept set, each kv-head its own.

Knows slots, and how the tokens of a step attend one after another with evictions in between, so that the result does
not depend on how a text is cut into calls. Does not know transformers or any rule. The new token's K and V go into the
slot that the last victim left; attention does not care about the order of slots, because positions live in the keys'
rotation.

What a policy is shown is the attention of the query heads of a group together, over what the row holds. A step of one
token asks it once for all layers of a group; of more tokens a layer has to see them all before the next one begins, so
every layer asks for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor

from headwater.cache.attention import attended, attention_weights
from headwater.cache.bank import Shape
from headwater.cache.holdings import Holdings
from headwater.cache.turning import Turning
from headwater.errors import CacheStateError
from headwater.policies import Policy

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(2),
    "sum": lambda weights: weights.sum(2),
    "max": lambda weights: weights.amax(2),
}
"""How the weights of the query heads of a group become those of their kv-head."""


BLOCK = 128
"""Queries of a whole prompt whose weights are computed at a time."""


class KeptLayer:
    """The slots of one layer: `keys` is `[batch, kv_heads, slots, key_dim]`, `values` likewise.

    `turning` is what closes the gaps between the positions of what is kept, and then keys lie as it arranges them; None
    leaves every key at its distance.
    """

    def __init__(self, shape: Shape, *, batch: int, slots: int, turning: Turning | None) -> None:
        self.shape, self.turning = shape, turning
        with torch.inference_mode(False):
            lead = (batch, shape.kv_heads, slots)
            self.keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)
            self.values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)

    @property
    def nbytes(self) -> int:
        """Physical bytes of K and V."""
        return sum(each.untyped_storage().nbytes() for each in (self.keys, self.values))

    def take(
        self,
        query: Float[Tensor, "batch heads tokens dim"],
        keys: Shaped[Tensor, "batch kv_heads tokens dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
        *,
        at: Int64[Tensor, " rows*tokens"],
        held: int,
        shifts: Int64[Tensor, "rows held"] | None,
        **how: Any,
    ) -> tuple[Float[Tensor, "batch heads tokens value_dim"], Float[Tensor, "batch heads tokens held"]]:
        """Write tokens into their slots, `at` counted over all rows; return what they attended to, among the first
        `held` slots, and with which weights."""
        if self.turning is not None:
            query, keys = self.turning.arrange(query), self.turning.arrange(keys)
        for side, new in ((self.keys, keys), (self.values, values)):
            side.view(-1, side.shape[-1]).index_copy_(0, at, new.reshape(-1, side.shape[-1]))
        known = self.keys[:, :, :held]
        if self.turning is not None and shifts is not None:
            known = self.turning.close(known, shifts)
        weights = attention_weights(query, known, **how)
        return attended(weights, self.values[:, :, :held]), weights

    def take_prompt(self, keys: Tensor, values: Tensor, kept: NDArray[np.int64]) -> None:
        """Fill the first slots with the tokens that stay, `kept` being their places in each row."""
        if self.turning is not None:
            keys = self.turning.arrange(keys)
        for side, new in ((self.keys, keys), (self.values, values)):
            at = torch.from_numpy(kept).to(side.device).view(*side.shape[:2], -1, 1)
            side[:, :, : kept.shape[1]] = new.gather(2, at.expand(-1, -1, -1, side.shape[3]))

    def lay(self, order: NDArray[np.int64]) -> None:
        """Lay what is held, `order` being its slots in each row, into the first slots."""
        for side in (self.keys, self.values):
            at = torch.from_numpy(order).to(side.device).view(*side.shape[:2], -1, 1)
            side[:, :, : order.shape[1]] = side.gather(2, at.expand(-1, -1, -1, side.shape[3]))

    def select(self, rows: Tensor) -> None:
        """Make conversation `i` of the batch what conversation `rows[i]` was."""
        with torch.inference_mode(False):
            self.keys = self.keys.index_select(0, rows.to(self.keys.device))
            self.values = self.values.index_select(0, rows.to(self.values.device))


class KeptGroup:
    """Layers under one policy with equally many kv-heads, `layers` by their number in the model. A step: `begin`,
    `attend` for every layer, `commit`. With `prompt`, a first step beyond the budget is attended to as a whole, and
    only then picked from."""

    def __init__(
        self,
        policy: Policy[Any],
        shapes: dict[int, Shape],
        turnings: dict[int, Turning],
        *,
        batch: int,
        reduce: str,
        prompt: bool = False,
    ) -> None:
        self.policy, self._batch, self._reduce, self._prompt = policy, batch, REDUCTIONS[reduce], prompt
        self.layers = {
            index: KeptLayer(shape, batch=batch, slots=policy.budget + 1, turning=turnings.get(index))
            for index, shape in shapes.items()
        }
        self._heads = next(iter(shapes.values())).kv_heads
        self._turnings = set(turnings.values())
        self.holdings = Holdings(policy, len(shapes) * self.rows)
        self._parts: dict[int, Holdings] = {}
        self._shown: dict[int, Tensor] = {}

    @property
    def rows(self) -> int:
        """Rows of a layer: its kv-heads in every conversation."""
        return self._batch * self._heads

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def by_layer(self) -> dict[int, NDArray[np.int64]]:
        """Positions held by each layer, `[rows, held]`."""
        return dict(zip(self.layers, np.split(self.holdings.slots.positions, len(self.layers)), strict=True))

    def begin(self, first: int, count: int) -> None:
        """Open a step of `count` tokens a row, the first of them at this position, as the model counts."""
        self._first, self._count = first, count
        self._parts, self._shown = {}, {}
        if count > 1:
            self._parts = dict(zip(self.layers, self.holdings.split(len(self.layers)), strict=True))
            return
        device = next(iter(self.layers.values())).keys.device
        at, shifts = self._place(self.holdings, first, 1)
        over = [None] * len(self.layers) if shifts is None else shifts.to(device).chunk(len(self.layers))
        self._at = dict(zip(self.layers, at.to(device).chunk(len(self.layers)), strict=True))
        self._shifts = dict(zip(self.layers, over, strict=True))

    def attend(
        self,
        index: int,
        query: Float[Tensor, "batch heads tokens dim"],
        keys: Shaped[Tensor, "batch kv_heads tokens dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
        **how: Any,
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        """Take a layer's tokens in, in order, and return what each attended to: what was held before it, and
        itself."""
        layer = self.layers[index]
        held = layer.keys
        if keys.dtype != held.dtype or keys.device != held.device or keys.shape[0] != held.shape[0]:
            raise CacheStateError(
                f"the cache holds {held.shape[0]} rows of {held.dtype} on {held.device} and was given "
                f"{keys.shape[0]} of {keys.dtype} on {keys.device}; reset() it, or make a new one after moving a model"
            )
        if self._count == 1:
            where = {"at": self._at[index], "held": self.holdings.held, "shifts": self._shifts[index]}
            output, weights = layer.take(query, keys, values, **where, **how)
            self._shown[index] = self._show(weights)
            return output.transpose(1, 2).contiguous()
        part, out, done = self._parts[index], [], 0
        if self._prompt and not part.seen and self._count > self.policy.budget:
            return self._attend_whole(part, layer, query, keys, values, **how)
        while done < self._count:
            taken = min(self._count - done, part.slot_count - part.held)
            now = slice(done, done + taken)
            at, shifts = self._place(part, self._first + done, taken)
            where = {"at": at.to(held.device), "held": part.held, "shifts": _to(shifts, held.device)}
            output, weights = layer.take(query[:, :, now], keys[:, :, now], values[:, :, now], **where, **how)
            out.append(output)
            if (order := part.observe(self._show(weights).cpu().numpy())) is not None:
                layer.lay(order)
            done += taken
        return torch.cat(out, dim=2).transpose(1, 2).contiguous()

    def _attend_whole(
        self, part: Holdings, layer: KeptLayer, query: Tensor, keys: Tensor, values: Tensor, **how: Any
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        out: list[Tensor] = []
        for start in range(0, self._count, BLOCK):
            stop = min(start + BLOCK, self._count)
            weights = attention_weights(query[:, :, start:stop], keys[:, :, :stop], **how)
            out.append(attended(weights, values[:, :, :stop]))
        last = attention_weights(query[:, :, -min(self._count, self.policy.prompt_steps) :], keys, **how)
        kept = part.take_prompt(self._first, self._count, self._show(last).cpu().numpy())
        layer.take_prompt(keys, values, kept)
        return torch.cat(out, dim=2).transpose(1, 2).contiguous()

    def commit(self) -> None:
        """End the step: what it showed is remembered, what is over the budget goes."""
        if self._count > 1:
            self.holdings = Holdings.join(list(self._parts.values()))
            self._parts = {}
            return
        shown = torch.cat([self._shown[index] for index in self.layers]).cpu().numpy()
        self._shown = {}
        if (order := self.holdings.observe(shown)) is not None:
            for layer, mine in zip(self.layers.values(), np.split(order, len(self.layers)), strict=True):
                layer.lay(mine)

    def check_rollback(self, count: int) -> None:
        """Raises CacheStateError when the newest `count` tokens cannot be taken back."""
        self.holdings.check_rollback(count)

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens, exactly."""
        self.holdings.rollback(count)

    def _place(self, holdings: Holdings, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Where tokens go, counted over the rows of a layer, and how far every key in use has to turn for them."""
        at = holdings.place(first, count) + np.arange(holdings.rows)[:, None] % self.rows * holdings.slot_count
        if not self._turnings:
            return torch.from_numpy(at.reshape(-1)), None
        shifts = holdings.shifts(first + count - 1)
        for turning in self._turnings:
            turning.reach(int(max(shifts.max(), -shifts.min())))
        return torch.from_numpy(at.reshape(-1)), torch.from_numpy(shifts)

    def _show(self, weights: Float[Tensor, "batch heads tokens slots"]) -> Float[Tensor, "rows tokens slots"]:
        """What the policy is shown of a layer's weights."""
        grouped = weights.view(weights.shape[0], self._heads, -1, *weights.shape[2:])
        return self._reduce(grouped).float().reshape(self.rows, *weights.shape[2:])

    def select(self, rows: Tensor) -> None:
        """Make conversation `i` of the batch what conversation `rows[i]` was."""
        for layer in self.layers.values():
            layer.select(rows)
        each = np.arange(len(self.layers))[:, None, None] * self.rows
        wanted = each + rows.cpu().numpy()[None, :, None] * self._heads + np.arange(self._heads)
        self._batch = len(rows)
        self.holdings = self.holdings.select(wanted.reshape(-1))


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
