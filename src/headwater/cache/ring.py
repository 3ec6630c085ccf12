"""The ring of a model in full precision: a window written in place, of which layers are given views.

Knows which slots a step writes, moves and shows. Does not know transformers, nor what all rings share (`any_ring`).

Keys of the window stay as they were written, and the pins are turned to lie right before the window. When the frame
moves, the window's keys are turned with it: between two rebases a whole window passes, so a key is turned once at the
most after it was written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from headwater.cache.any_ring import AnyRing, Step
from headwater.cache.bank import Bank, Shape
from headwater.cache.ledger import Plan


class Ring(AnyRing[Bank]):
    """K and V as the model makes them."""

    def _bank(self, shape: Shape, layers: int, batch: int) -> Bank:
        return Bank(shape, layers=layers, batch=batch, slots=self.ledger.slots, pins=self.window.pins)

    # A step: begin, update every layer, commit.

    def begin(self, count: int, batch: int, *, exact: bool = False) -> Step:
        if not self.banks:
            self.make_banks(batch)
        self._check_batch(batch)
        step = Step(count=count, wide=count > self.ledger.room, plan=self.ledger.plan(count))
        if step.wide and exact:
            self._group(step)
        self.step = step
        return step

    def update(
        self,
        layer: int,
        keys: Shaped[Tensor, "batch kv_heads tokens key_dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
    ) -> tuple[Tensor, Tensor]:
        step = self._opened()
        shape, index = self._place[layer]
        bank = self.banks[shape]
        self._check(shape, keys, step)
        held = self.ledger.held
        if not step.wide:
            bank.write(index, held, keys, values)
            return bank.view(index, 0, held + step.count)
        step.fresh[layer] = _survivors(keys, step.plan), _survivors(values, step.plan)
        if not step.exact:
            old_keys, old_values = bank.view(index, 0, held)
            return torch.cat((old_keys, keys), dim=2), torch.cat((old_values, values), dim=2)
        return self._spread(bank, index, keys, values, step)

    def commit(self) -> None:
        step = self.step
        if step is None:
            return
        if step.wide:
            self._check_all_updated(step)
        seen, plan = self.ledger.seen, step.plan
        moves = self.ledger.settle(plan)
        for bank in self.banks.values():
            bank.move(moves)
        if step.wide:
            slot = self.ledger.held - plan.head - plan.tail
            for layer, (keys, values) in step.fresh.items():
                shape, index = self._place[layer]
                self.banks[shape].write(index, slot, keys, values)
        pins = min(self.window.pins, self.ledger.seen)
        if seen < pins:
            for bank in self.banks.values():
                bank.keep_pristine(seen, pins)
        if self.reindex and plan.evict + plan.lost:
            self._place_pins()
        self.step = None

    # Exact wide steps: every query sees the pins where they lay for it, and the window as it was for it.

    def _spread(self, bank: Bank, index: int, keys: Tensor, values: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        pins, held = self.window.pins, self.ledger.held
        window_keys, window_values = bank.view(index, pins, held)
        if self.reindex:
            pin_keys, pin_values = bank.pins_at(index, [gone - self.base for gone in step.gone])
        else:
            pin_keys, pin_values = bank.view(index, 0, pins)
        return torch.cat((pin_keys, window_keys, keys), dim=2), torch.cat((pin_values, window_values, values), dim=2)

    def visible(self, step: Step, device: torch.device) -> Bool[Tensor, "1 1 queries slots"]:
        pins, held, seen, count = self.window.pins, self.ledger.held, self.ledger.seen, step.count
        group = torch.tensor(step.group, device=device)
        oldest = (pins + torch.tensor(step.gone, device=device))[group][:, None]
        if self.reindex:
            own = torch.arange(len(step.gone), device=device).repeat_interleave(pins)[None] == group[:, None]
        else:
            own = torch.ones(count, pins, dtype=torch.bool, device=device)
        window = torch.tensor(self.ledger.position_of[pins:held], device=device)[None] >= oldest
        new = torch.arange(seen, seen + count, device=device)
        causal = (new[None] <= new[:, None]) & (new[None] >= oldest)
        return torch.cat((own, window, causal), dim=1)[None, None]

    def calm(self, count: int) -> int:
        return min(count, self.ledger.room)

    def exact_chunk(self, count: int) -> int:
        if count <= self.ledger.room or self.ledger.seen < self.window.pins:
            return self.calm(count)
        return self._longest_exact(count)

    # Between steps.

    def rebase(self) -> int:
        down = self.ledger.gone - self.base
        if down:
            self.base = self.ledger.gone
            for bank in self.banks.values():
                bank.turn_window(self.ledger.held, -down)
            self._place_pins()
        return down

    def evict(self, count: int) -> None:
        moves = self.ledger.evict(count)
        for bank in self.banks.values():
            bank.move(moves)
        if count and self.reindex:
            self._place_pins()

    def rollback(self, count: int) -> None:
        moves = self.ledger.rollback(count)
        for bank in self.banks.values():
            bank.move(moves)

    def skip(self, positions: int) -> None:
        self.ledger.skip(positions)
        for bank in self.banks.values():
            bank.turn_window(self.ledger.held, positions)
        self._place_pins()

    # What is saved.

    def parts(self) -> Mapping[str, Tensor]:
        pins, held = min(self.window.pins, self.ledger.seen), self.ledger.held
        return {
            f"bank.{index}.{name}": part
            for index, bank in enumerate(self.banks.values())
            for name, part in (
                ("keys", bank.keys[..., :held, :]),
                ("values", bank.values[..., :held, :]),
                ("pristine", bank.pristine[..., :pins, :]),
            )
        }


def _survivors(
    fresh: Shaped[Tensor, "batch kv_heads tokens dim"], plan: Plan
) -> Shaped[Tensor, "batch kv_heads kept dim"]:
    """The part of a wide step's K or V that is held after it: a copy, so that the rest can be freed."""
    count = fresh.shape[2]
    return torch.cat((fresh[:, :, : plan.head], fresh[:, :, count - plan.tail :]), dim=2)
