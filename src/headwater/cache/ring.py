"""The ring of a model: the ledger, the banks of all its layers, and the frame that positions are counted in.

Knows what a step is: it begins, every layer attends, and only then it is committed, with its eviction. Nothing of the
state changes before the commit, so a step that fails half way leaves the ring as it was. Does not know transformers:
the adapter tells it when a step begins and ends.

The frame. Keys of the window stay as they were written, and the pins are turned to lie right before the window. What
the model is told is `position - base`; `base` moves up, and the window's keys with it, when positions have grown past
`rebase_at`. Between two rebases a whole window passes, so a key is turned once at the most after it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from headwater.cache.bank import Bank, Shape
from headwater.cache.ledger import Ledger, Plan
from headwater.errors import CacheStateError
from headwater.policies.window import Window

PINNED_COPIES = 4096
"""The most slots that copies of the pins may take in one step fed as if token by token."""

CHUNK = 64
"""The most tokens in such a step: from there on the gain is small."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A step under way: `count` tokens; `wide` when they do not fit in the slots; `exact` when each of them must see
    what it would have seen alone. `gone` is how many tokens were evicted before each distinct group of queries,
    `group` which of them each query belongs to."""

    count: int
    wide: bool
    plan: Plan
    gone: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    fresh: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return bool(self.gone)


class Ring:
    """The K and V of one stream (a batch of rows that advance together) under a window."""

    def __init__(self, window: Window, shapes: Sequence[Shape], *, reindex: bool = True) -> None:
        self.window, self.reindex, self.shapes = window, reindex, tuple(shapes)
        groups: dict[Shape, int] = {}
        self._place: list[tuple[Shape, int]] = []
        for shape in self.shapes:
            self._place.append((shape, groups.get(shape, 0)))
            groups[shape] = groups.get(shape, 0) + 1
        self._sizes = groups
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.ledger = Ledger(window=self.window)
        self.banks: dict[Shape, Bank] = {}
        self.base = 0
        self.step: Step | None = None

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self.banks.values())

    @property
    def next_position(self) -> int:
        """Position of the next token in the model's frame."""
        return self.ledger.seen - self.base

    def make_banks(self, batch: int) -> None:
        """Take the memory for a batch of so many rows."""
        self.banks = {
            shape: Bank(shape, layers=size, batch=batch, slots=self.ledger.slots, pins=self.window.pins)
            for shape, size in self._sizes.items()
        }

    # A step: begin, update every layer, commit.

    def begin(self, count: int, batch: int, *, exact: bool = False) -> Step:
        """Open a step of `count` tokens a row. `exact` lets every token see what it would have seen alone."""
        if not self.banks:
            self.make_banks(batch)
        self._check_batch(batch)
        wide = count > self.ledger.room
        step = Step(count=count, wide=wide, plan=self.ledger.plan(count))
        if wide and exact:
            for index in range(count):
                gone = self.ledger.gone + self.window.excess(self.ledger.held + index)
                if not step.gone or step.gone[-1] != gone:
                    step.gone.append(gone)
                step.group.append(len(step.gone) - 1)
        self.step = step
        return step

    def update(
        self,
        layer: int,
        keys: Shaped[Tensor, "batch kv_heads tokens key_dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's K and V of the step's tokens; return all that they attend to, themselves last."""
        step = self.step
        if step is None:
            raise CacheStateError("the cache was updated outside of a forward pass of the model it was made for")
        shape, index = self._place[layer]
        bank = self.banks[shape]
        self._check(bank, keys, step)
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
        """End the step: what it added is held, what is over the budget goes."""
        step = self.step
        if step is None:
            return
        if step.wide and len(step.fresh) < len(self.shapes):
            missing = sorted(set(range(len(self.shapes))) - set(step.fresh))
            raise CacheStateError(f"layers {missing} were not updated in this step; the cache is as it was before it")
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

    def _check_batch(self, rows: int) -> None:
        held = next(iter(self.banks.values())).keys.shape[1]
        if rows != held:
            raise CacheStateError(f"the cache holds a batch of {held} rows and was given {rows}; reset() it first")

    def _check(self, bank: Bank, keys: Tensor, step: Step) -> None:
        self._check_batch(keys.shape[0])
        if keys.dtype != bank.keys.dtype or keys.device != bank.keys.device:
            raise CacheStateError(
                f"the cache holds {bank.keys.dtype} on {bank.keys.device} and was given {keys.dtype} on {keys.device}; "
                f"make a new cache after moving the model"
            )
        if keys.shape[2] != step.count:
            raise CacheStateError(f"the step has {step.count} tokens and a layer was given {keys.shape[2]}")

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
        """Which of the K that `update` returns in an exact wide step each of its queries sees."""
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

    def exact_chunk(self, count: int) -> int:
        """How many of the next `count` tokens to feed in one exact step."""
        if count <= self.ledger.room or self.ledger.seen < self.window.pins:
            return min(count, self.ledger.room)
        copies = PINNED_COPIES // max(1, self.window.pins) if self.reindex else CHUNK
        return max(1, min(count, CHUNK, (copies - 1) * self.window.block))

    # Between steps.

    def rebase(self) -> int:
        """Count positions from the first token held in the window; return by how much they went down."""
        down = self.ledger.gone - self.base
        if down:
            self.base = self.ledger.gone
            for bank in self.banks.values():
                bank.turn_window(self.ledger.held, -down)
            self._place_pins()
        return down

    def _place_pins(self) -> None:
        shift = self.ledger.gone - self.base if self.reindex else -self.base
        for bank in self.banks.values():
            bank.place_pins(shift)

    def evict(self, count: int) -> None:
        """Drop the `count` oldest unpinned tokens now."""
        moves = self.ledger.evict(count)
        for bank in self.banks.values():
            bank.move(moves)
        if count and self.reindex:
            self._place_pins()

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens."""
        moves = self.ledger.rollback(count)
        for bank in self.banks.values():
            bank.move(moves)

    def skip(self, positions: int) -> None:
        """Move the stream's positions on, as if that many tokens had passed through the window.

        The window's keys are really turned there, so that what follows (the pins, the next rebase) meets what it would
        meet that far into a stream.
        """
        self.ledger.skip(positions)
        for bank in self.banks.values():
            bank.turn_window(self.ledger.held, positions)
        self._place_pins()

    def select(self, rows: Tensor) -> None:
        """Make row `i` of the batch what row `rows[i]` was."""
        for bank in self.banks.values():
            bank.select(rows)


def _survivors(
    fresh: Shaped[Tensor, "batch kv_heads tokens dim"], plan: Plan
) -> Shaped[Tensor, "batch kv_heads kept dim"]:
    """The part of a wide step's K or V that is held after it: a copy, so that the rest can be freed."""
    count = fresh.shape[2]
    return torch.cat((fresh[:, :, : plan.head], fresh[:, :, count - plan.tail :]), dim=2)
