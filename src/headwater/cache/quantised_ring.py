"""The ring of a model in int8: pins and the newest tokens in full precision, all between them quantised.

Knows when a token is quantised, and by how much quantised keys must be turned when they are read. Does not know
tensors' layout (`quantised`), nor what all rings share (`any_ring`).

Tokens age a group at a time, at fixed places of the stream (multiples of the group), so what is quantised when never
depends on how the text was cut into calls. Between two steps the newest `group` to `2 * group - 1` unpinned tokens are
in full precision. Each token is quantised once: a key stays as it was written. When the frame moves, only the pins and
the newest tokens are turned; keys that were quantised in an earlier frame are turned when they are read, by how far
the frame moved since, until the last of them leaves, a window later.

A window is a run of numbers (`quantised`): `[gone, aged)` is quantised, from `aged` on it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from headwater.cache.any_ring import AnyRing, Step
from headwater.cache.bank import Shape, cosines
from headwater.cache.quantised import Fresh, QuantisedBank, Turn, quantise, runs, stacked
from headwater.policies.window import Window

Pair = tuple[Tensor, Tensor]
"""K and V."""

GROUP = 8
"""The most tokens that are quantised at a time."""

GROUPS = 8
"""At least so many groups are in a window, so that a small one is quantised, too."""


class QuantisedRing(AnyRing[QuantisedBank]):
    """K and V in int8, with a float32 scale for every token and kv-head.

    A layer and row takes `kv_heads * ((key_dim + value_dim + 8) * (budget - pins - group) + itemsize * (key_dim +
    value_dim) * (pins + 2 * group - 1) + 4 * key_dim * pins)` bytes; `group` is an eighth of the window and 8 at the
    most. The last term, the pins' keys as they were written, is there only where keys are turned.
    """

    kv_dtype = "int8"

    def __init__(self, window: Window, shapes: Sequence[Shape], *, reindex: bool = True) -> None:
        self.group = max(1, min(GROUP, window.recent // GROUPS))
        super().__init__(window, shapes, reindex=reindex)

    def reset(self) -> None:
        super().reset()
        self._aged = 0
        self._skipped = 0
        self._frames: list[tuple[int, int]] = []
        """From which number on keys were quantised in which frame (its base)."""
        self._turns: dict[Shape, list[Turn]] = {}
        self._places: list[tuple[slice, slice]] = []

    def _bank(self, shape: Shape, layers: int, batch: int) -> QuantisedBank:
        return QuantisedBank(
            shape,
            layers=layers,
            batch=batch,
            slots=self.window.recent - self.group,
            newest=2 * self.group - 1,
            pins=self.window.pins,
        )

    # The window as a run of numbers.

    @property
    def _first(self) -> int:
        """The number of the next token; below 0 for a pin."""
        return self.ledger.seen - self.window.pins - self._skipped

    @property
    def _gone(self) -> int:
        return self.ledger.gone - self._skipped

    @property
    def _pinned(self) -> int:
        return min(self.window.pins, self.ledger.seen)

    @property
    def _newest(self) -> int:
        """Tokens of the window in full precision."""
        return max(0, self._first - self._aged)

    def _aged_at(self, seen: int) -> int:
        """How many tokens of the window are quantised when so many of it were seen."""
        return max(self._aged, self.group * (seen // self.group - 1))

    # A step: begin, update every layer, commit.

    def begin(self, count: int, batch: int, *, exact: bool = False) -> Step:
        if not self.banks:
            self.make_banks(batch)
        self._check_batch(batch)
        step = Step(count=count, wide=count > self.ledger.room, plan=self.ledger.plan(count))
        if exact and count > self.calm(count) and self._first >= 0:
            self._group(step)
        self._places = list(runs(self._gone, self._aged, self.window.recent - self.group))
        self._turns = {shape: turns for shape in self.banks if (turns := self._turns_of(shape))}
        self.step = step
        return step

    def _turns_of(self, shape: Shape) -> list[Turn]:
        edges = [*(start for start, _ in self._frames), self._aged]
        return [
            Turn(max(start, self._gone), stop, *cosines(shape.rotation, base - self.base, shape.device))
            for (start, base), stop in zip(self._frames, edges[1:], strict=True)
            if shape.rotation and base != self.base and stop > self._gone
        ]

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
        step.fresh[layer] = self._left(keys, step), self._left(values, step)
        if step.exact:
            return self._spread(bank, index, keys, values, step)
        used = self._pinned + self._newest
        before = bank.keys.exact[index, :, :, :used], bank.values.exact[index, :, :, :used]
        return self._all(bank, index, before, (keys, values))

    def _all(self, bank: QuantisedBank, index: int, before: Pair, after: Pair) -> Pair:
        """The quantised tokens of a layer between others."""
        keys = bank.keys.between(index, before[0], self._places, after[0])
        if turns := self._turns.get(bank.shape):
            bank.turn(keys[:, :, before[0].shape[2] :], turns, self._gone)
        return keys, bank.values.between(index, before[1], self._places, after[1])

    def _left(self, fresh: Tensor, step: Step) -> Fresh:
        """What the step's K or V leave for the commit."""
        if step.count == 1:
            return Fresh(fresh, None)
        pins = max(0, min(-self._first, step.count))
        quantised, newest = (min(step.count, max(pins, number - self._first)) for number in self._after(step))
        exact = torch.cat((fresh[:, :, :pins], fresh[:, :, newest:]), dim=2)
        return Fresh(exact, quantise(fresh[:, :, quantised:newest]) if quantised < newest else None)

    def _after(self, step: Step) -> tuple[int, int]:
        """The first unpinned number held after the step, and the first one in full precision."""
        gone = self._gone + step.plan.evict + step.plan.lost
        return gone, max(gone, self._aged_at(self._first + step.count))

    # Exact steps: every query sees the pins where they lay for it, and the rest in the precision that it had for it.

    def _spread(self, bank: QuantisedBank, index: int, keys: Tensor, values: Tensor, step: Step) -> Pair:
        pins = bank.pins
        (pinned_keys, new_keys), (pinned, new) = (
            side.exact[index, :, :, : pins + self._newest].split((pins, self._newest), dim=2) for side in bank.sides
        )
        if self.reindex:
            shifts = [gone - self.base for gone in step.gone]
            pinned_keys, pinned = bank.pinned_keys(index, shifts), pinned.repeat(1, 1, len(shifts), 1)
        before = torch.cat((pinned_keys, new_keys), dim=2), torch.cat((pinned, new), dim=2)
        return self._all(bank, index, before, (self._aging(new_keys, keys, step), self._aging(new, values, step)))

    def _aging(self, newest: Tensor, fresh: Tensor, step: Step) -> Tensor:
        """The tokens that age in the step, as they will be, and then those that it adds."""
        aging = torch.cat((newest, fresh), dim=2)[:, :, : self._ages(step)]
        return torch.cat((quantise(aging).full(fresh.dtype), fresh), dim=2)

    def _ages(self, step: Step) -> int:
        """How many tokens the step's last query sees quantised, and the first one in full precision."""
        return self._aged_at(self._first + step.count - 1) - self._aged

    def visible(self, step: Step, device: torch.device) -> Bool[Tensor, "1 1 queries slots"]:
        count, pins, first = step.count, self.window.pins, self._first
        group = torch.tensor(step.group, device=device)
        gone = (torch.tensor(step.gone, device=device) - self._skipped)[group][:, None]
        aged = torch.tensor([self._aged_at(first + index) for index in range(count)], device=device)[:, None]
        oldest = torch.maximum(gone, aged)
        if self.reindex:
            own = torch.arange(len(step.gone), device=device).repeat_interleave(pins)[None] == group[:, None]
        else:
            own = torch.ones(count, pins, dtype=torch.bool, device=device)
        newest = torch.arange(self._aged, first, device=device)[None] >= oldest
        quantised = torch.arange(self._gone, self._aged, device=device)[None] >= gone
        aging = torch.arange(self._aged, self._aged + self._ages(step), device=device)[None]
        new = torch.arange(first, first + count, device=device)
        causal = (new[None] <= new[:, None]) & (new[None] >= oldest)
        return torch.cat((own, newest, quantised, (aging >= gone) & (aging < aged), causal), dim=1)[None, None]

    def commit(self) -> None:
        step = self.step
        if step is None:
            return
        self._check_all_updated(step)
        seen, first = self.ledger.seen, self._first
        gone, aged = self._after(step)
        self._leave(gone, min(aged, max(first, gone)))
        slot = self._pinned + self._newest
        self.ledger.settle(step.plan)
        for shape, bank in self.banks.items():
            layers = [step.fresh[layer] for layer, (its, _) in enumerate(self._place) if its == shape]
            for side, fresh in zip(bank.sides, zip(*layers, strict=True), strict=True):
                side.put(slot, max(first, gone), stacked(fresh))
        self._age(aged)
        if seen < self._pinned:
            for bank in self.banks.values():
                bank.keep_pristine(seen, self._pinned)
        if self.reindex and step.plan.evict + step.plan.lost:
            self._place_pins()
        self.step = None

    def _leave(self, gone: int, aged: int) -> None:
        """Of the tokens held, those before `gone` go, and those before `aged` are quantised."""
        newest = self._newest
        lost = min(newest, max(0, gone - self._aged))
        ages = min(newest - lost, max(0, aged - self._aged - lost))
        if lost + ages:
            for bank in self.banks.values():
                for side in bank.sides:
                    side.leave(bank.pins, lost=lost, aged=ages, stay=newest - lost - ages, number=self._aged + lost)
        if lost:
            self._age(self._aged + lost)
        if ages:
            self._age(self._aged + ages)

    def _age(self, aged: int) -> None:
        """Tokens before `aged` are quantised or gone; new ones among them are in the frame of now."""
        if aged > self._aged:
            if not self._frames or self._frames[-1][1] != self.base:
                self._frames.append((self._aged, self.base))
            self._aged = aged
        while len(self._frames) > 1 and self._frames[1][0] <= self._gone:
            del self._frames[0]

    def calm(self, count: int) -> int:
        return min(count, self.ledger.room, self.group * (self._aged // self.group + 2) - self._first)

    def exact_chunk(self, count: int) -> int:
        calm = self.calm(count)
        if count <= calm or self._first < 0:
            return calm
        return count if count <= self.ledger.room else self._longest_exact(count)

    # Between steps.

    def rebase(self) -> int:
        down = self.ledger.gone - self.base
        if down:
            self.base = self.ledger.gone
            for bank in self.banks.values():
                bank.turn_newest(-down)
            self._place_pins()
        return down

    def evict(self, count: int) -> None:
        self.ledger.evict(count)
        self._leave(self._gone, self._gone)
        if count and self.reindex:
            self._place_pins()

    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens. What had been quantised before them stays so, also where it would be
        among the newest again."""
        self.ledger.rollback(count)
        self._aged = max(0, min(self._aged, self._first))
        self._frames = [(start, base) for start, base in self._frames if start < self._aged]

    def skip(self, positions: int) -> None:
        self.ledger.skip(positions)
        self._skipped += positions
        self._frames = [(start, base + positions) for start, base in self._frames]
        for bank in self.banks.values():
            bank.turn_newest(positions)
        self._place_pins()

    # What is saved.

    def parts(self) -> Mapping[str, Tensor]:
        quantised, exact = min(self.window.recent - self.group, self._aged), self._pinned + self._newest
        parts: dict[str, Tensor] = {}
        for index, bank in enumerate(self.banks.values()):
            parts[f"bank.{index}.pristine"] = bank.pristine[..., : self._pinned, :]
            for name, side in zip(("keys", "values"), bank.sides, strict=True):
                parts[f"bank.{index}.{name}.exact"] = side.exact[..., :exact, :]
                parts[f"bank.{index}.{name}.scales"] = side.scales[..., :quantised, :]
                parts[f"bank.{index}.{name}.numbers"] = side.numbers[..., :quantised, :]
        return parts

    def facts(self) -> Mapping[str, Any]:
        return {"kv_dtype": "int8", "aged": self._aged, "skipped": self._skipped, "frames": self._frames}

    def recall(self, facts: Mapping[str, Any]) -> None:
        self._aged, self._skipped = facts["aged"], facts["skipped"]
        self._frames = [(start, base) for start, base in facts["frames"]]
