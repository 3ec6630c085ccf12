"""What a cache is made of, taken out and put back: numbers that JSON can hold, and tensors on the host.

Knows rings, kept layers, and the layers that a model keeps by itself. Does not know files or transformers; the adapter
says which layers of a model's own can be saved. What is taken out is a copy: the cache may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.cache.any_ring import AnyRing
from headwater.cache.host import Copies
from headwater.cache.kept import KeptGroup
from headwater.cache.ledger import Ledger
from headwater.errors import SnapshotError
from headwater.policies import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A cache between two steps."""

    numbers: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __or__(self, other: State) -> State:
        return State(numbers={**self.numbers, **other.numbers}, tensors={**self.tensors, **other.tensors})


def ring_state(ring: AnyRing[Any], copies: Copies) -> State:
    """A ring: only slots that hold something, and the pins' keys as they were written."""
    ledger = ring.ledger
    numbers = {
        "seen": ledger.seen,
        "gone": ledger.gone,
        "evicted_at": ledger.evicted_at,
        "base": ring.base,
        "batch": ring.batch,
        **ring.facts(),
    }
    tensors = {"positions": torch.tensor(ledger.position_of, dtype=torch.int64)}
    for name, part in ring.parts().items():
        tensors[name] = copies.copied(part)
    return State(numbers=numbers, tensors=tensors)


def load_ring(ring: AnyRing[Any], state: State) -> None:
    """Make an empty ring what it was. Raises SnapshotError for a state that does not fit the ring."""
    numbers = state.numbers
    if (kind := numbers.get("kv_dtype")) != ring.kv_dtype:
        raise SnapshotError(
            f"the snapshot holds K and V {_kind(kind)}, and this cache keeps them {_kind(ring.kv_dtype)}; restore it "
            f"with kv_dtype={kind!r}"
        )
    places = state.tensors["positions"].tolist()
    if len(places) != numbers["seen"] - numbers["gone"] or len(places) > ring.window.budget:
        raise SnapshotError(f"the snapshot holds {len(places)} tokens, which do not fit a {ring.window}")
    ring.reset()
    if not numbers["batch"]:
        return
    ring.make_banks(numbers["batch"])
    ring.base = numbers["base"]
    ring.ledger = Ledger(
        window=ring.window,
        seen=numbers["seen"],
        gone=numbers["gone"],
        evicted_at=numbers["evicted_at"],
        slot_of={position: slot for slot, position in enumerate(places)},
        position_of=places,
    )
    ring.recall(numbers)
    for name, part in ring.parts().items():
        _fill(part, state.tensors[name])


def _kind(kv_dtype: str | None) -> str:
    return "in the model's precision" if kv_dtype is None else f"in {kv_dtype}"


def kept_state(seen: int, groups: Sequence[KeptGroup], copies: Copies) -> State:
    """Layers under a policy: the slots in use, as they lie, so that sums go on in the same order; and what the policy
    remembers of them."""
    numbers: dict[str, Any] = {"seen": seen}
    tensors: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        holdings = group.holdings
        used = int(holdings.where.max(initial=-1)) + 1
        for index, layer in group.layers.items():
            numbers["batch"] = layer.keys.shape[0]
            for side, tensor in (("keys", layer.keys), ("values", layer.values)):
                tensors[f"kept.{index}.{side}"] = copies.copied(tensor[:, :, :used])
        arrays = {
            "positions": holdings.slots.positions,
            "where": holdings.where,
            "written": holdings.written[:, :used],
        }
        remembered = group.policy.signal.arrays(holdings.slots.state)
        arrays |= {f"state.{part}": array for part, array in remembered.items()}
        tensors |= {f"group.{number}.{part}": torch.from_numpy(array.copy()) for part, array in arrays.items()}
    return State(numbers=numbers, tensors=tensors)


def load_kept(groups: Sequence[KeptGroup], state: State) -> None:
    """Make fresh layers what they were. Raises SnapshotError for a state that does not fit them."""
    for number, group in enumerate(groups):
        mine = {
            name.removeprefix(f"group.{number}."): each.cpu().numpy().copy()
            for name, each in state.tensors.items()
            if name.startswith(f"group.{number}.")
        }
        holdings, positions = group.holdings, mine["positions"]
        if positions.shape[0] != holdings.rows or positions.shape[1] > group.policy.budget:
            raise SnapshotError(
                f"the snapshot holds {list(positions.shape)} tokens in layers {', '.join(map(str, group.layers))}, "
                "which do not fit"
            )
        for index, layer in group.layers.items():
            for side, target in (("keys", layer.keys), ("values", layer.values)):
                source = state.tensors[f"kept.{index}.{side}"]
                _fill(target[:, :, : source.shape[2]], source)
        remembered = {name.removeprefix("state."): each for name, each in mine.items() if name.startswith("state.")}
        slots = Slots(positions=positions, state=group.policy.signal.from_arrays(remembered))
        holdings.restore(slots, mine["where"], mine["written"], int(state.numbers["seen"]))


def layers_state(layers: Sequence[tuple[int, Any]], copies: Copies) -> State:
    """Layers of a model's own, with their numbers."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for index, layer in layers:
        if layer.is_initialized:
            tensors[f"layer.{index}.keys"] = copies.copied(layer.keys)
            tensors[f"layer.{index}.values"] = copies.copied(layer.values)
        if hasattr(layer, "cumulative_length"):
            numbers[f"layer.{index}.seen"] = int(layer.cumulative_length)
    return State(numbers=numbers, tensors=tensors)


def load_layers(layers: Sequence[tuple[int, Any]], state: State) -> None:
    """Make fresh layers of a model's own what they were, on the device that the state's tensors are on."""
    for index, layer in layers:
        if (keys := state.tensors.get(f"layer.{index}.keys")) is not None:
            keys, values = keys.clone(), state.tensors[f"layer.{index}.values"].clone()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        if (seen := state.numbers.get(f"layer.{index}.seen")) is not None:
            layer.cumulative_length = seen


def _fill(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise SnapshotError(
            f"the snapshot has {list(source.shape)} of {source.dtype} where this cache has {list(target.shape)} of "
            f"{target.dtype}"
        )
    target.copy_(source)
