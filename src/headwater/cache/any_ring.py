"""What every ring of a model shares: the ledger, a bank for the layers of each shape, the step, and the frame.

Knows what a step is: it begins, every layer attends, and only then it is committed, with its eviction. Nothing of the
state changes before the commit, so a step that fails half way leaves the ring as it was. Does not know what a bank
keeps K and V as, nor transformers: the adapter tells it when a step begins and ends.

The frame. What the model is told is `position - base`; `base` moves up when positions have grown past what the model
shall be told, at most once in the time in which a whole window passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from headwater.cache.bank import Shape
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
    `group` which of them each query belongs to; `fresh` what a layer's K and V leave for the commit."""

    count: int
    wide: bool
    plan: Plan
    gone: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    fresh: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return bool(self.gone)


class AnyBank(Protocol):
    """The K and V of all layers of one shape."""

    @property
    def batch(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def place_pins(self, shift: int) -> None: ...

    def select(self, rows: Tensor) -> None: ...


B = TypeVar("B", bound=AnyBank)


class AnyRing(ABC, Generic[B]):
    """The K and V of one stream (a batch of rows that advance together) under a window."""

    kv_dtype: str | None = None
    """What K and V are kept as; None for what the model makes them."""

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
        self.banks: dict[Shape, B] = {}
        self.base = 0
        self.step: Step | None = None

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self.banks.values())

    @property
    def batch(self) -> int:
        """Rows that advance together; 0 before the first step."""
        return next((bank.batch for bank in self.banks.values()), 0)

    @property
    def next_position(self) -> int:
        """Position of the next token in the model's frame."""
        return self.ledger.seen - self.base

    def make_banks(self, batch: int) -> None:
        """Take the memory for a batch of so many rows."""
        self.banks = {shape: self._bank(shape, size, batch) for shape, size in self._sizes.items()}

    @abstractmethod
    def _bank(self, shape: Shape, layers: int, batch: int) -> B:
        """An empty bank."""

    # A step: begin, update every layer, commit.

    @abstractmethod
    def begin(self, count: int, batch: int, *, exact: bool = False) -> Step:
        """Open a step of `count` tokens a row. `exact` lets every token see what it would have seen alone."""

    @abstractmethod
    def update(
        self,
        layer: int,
        keys: Shaped[Tensor, "batch kv_heads tokens key_dim"],
        values: Shaped[Tensor, "batch kv_heads tokens value_dim"],
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's K and V of the step's tokens; return all that they attend to, themselves last."""

    @abstractmethod
    def commit(self) -> None:
        """End the step: what it added is held, what is over the budget goes."""

    @abstractmethod
    def visible(self, step: Step, device: torch.device) -> Bool[Tensor, "1 1 queries slots"]:
        """Which of the K that `update` returns in an exact step each of its queries sees."""

    @abstractmethod
    def calm(self, count: int) -> int:
        """How many of the next `count` tokens see in one step, without a mask, what each would have seen alone."""

    @abstractmethod
    def exact_chunk(self, count: int) -> int:
        """How many of the next `count` tokens to feed in one exact step."""

    def _group(self, step: Step) -> None:
        """Tell the step's queries apart by how many tokens were evicted before them."""
        for index in range(step.count):
            gone = self.ledger.gone + self.window.excess(self.ledger.held + index)
            if not step.gone or step.gone[-1] != gone:
                step.gone.append(gone)
            step.group.append(len(step.gone) - 1)

    def _longest_exact(self, count: int) -> int:
        """How many of the next `count` tokens go in a step that evicts and is exact."""
        copies = PINNED_COPIES // max(1, self.window.pins) if self.reindex else CHUNK
        return max(1, min(count, CHUNK, (copies - 1) * self.window.block))

    def _opened(self) -> Step:
        if self.step is None:
            raise CacheStateError("the cache was updated outside of a forward pass of the model it was made for")
        return self.step

    def _check_batch(self, rows: int) -> None:
        if rows != self.batch:
            raise CacheStateError(
                f"the cache holds a batch of {self.batch} rows and was given {rows}; reset() it first"
            )

    def _check(self, shape: Shape, keys: Tensor, step: Step) -> None:
        self._check_batch(keys.shape[0])
        if keys.dtype != shape.dtype or keys.device != shape.device:
            raise CacheStateError(
                f"the cache holds {shape.dtype} on {shape.device} and was given {keys.dtype} on {keys.device}; "
                f"make a new cache after moving the model"
            )
        if keys.shape[2] != step.count:
            raise CacheStateError(f"the step has {step.count} tokens and a layer was given {keys.shape[2]}")

    def _check_all_updated(self, step: Step) -> None:
        if missing := sorted(set(range(len(self.shapes))) - set(step.fresh)):
            raise CacheStateError(f"layers {missing} were not updated in this step; the cache is as it was before it")

    # Between steps.

    @abstractmethod
    def rebase(self) -> int:
        """Count positions from the first token held in the window; return by how much they went down."""

    @abstractmethod
    def evict(self, count: int) -> None:
        """Drop the `count` oldest unpinned tokens now."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the newest `count` tokens."""

    @abstractmethod
    def skip(self, positions: int) -> None:
        """Move the stream's positions on, as if that many tokens had passed through the window.

        The window's keys are really turned there, so that what follows (the pins, the next rebase) meets what it would
        meet that far into a stream.
        """

    def select(self, rows: Tensor) -> None:
        """Make row `i` of the batch what row `rows[i]` was."""
        for bank in self.banks.values():
            bank.select(rows)

    def _place_pins(self) -> None:
        shift = self.ledger.gone - self.base if self.reindex else -self.base
        for bank in self.banks.values():
            bank.place_pins(shift)

    # What is saved.

    @abstractmethod
    def parts(self) -> Mapping[str, Tensor]:
        """The parts of the banks' buffers that are in use, by name."""

    def facts(self) -> Mapping[str, Any]:
        """What a ring of this kind needs beside its ledger and its base, as JSON allows."""
        return {}

    def recall(self, facts: Mapping[str, Any]) -> None:
        """Take the facts back."""
        del facts
