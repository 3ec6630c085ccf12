"""Whether policies keep, live, what a replay of that very attention keeps.

The recording is taken inside the live run: what each token paid to what its head still held, put to its positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.cache import holdings as holdings_module
from headwater.cache.policy_cache import PolicyCache, attach
from headwater.policies import Policy
from headwater.policies.incremental import step
from headwater.traces import ArrayTrace, replay
from headwater.traces.trace import Head


def live_and_replayed(
    model: Any, choice: Policy[Any], tokens: list[int], *, reindex: str
) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """After every token, what each head of each layer keeps: live, and in the replay. Tokens go one by one."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    weights = np.zeros((layers * heads, len(tokens), len(tokens)), dtype=np.float32)
    cache, live = PolicyCache(model, choice, reindex=reindex), []
    with torch.inference_mode(), attach(model), _recording(weights):
        for token in tokens:
            model(input_ids=torch.tensor([[token]]), cache=cache)
            live.append([row.tolist() for positions in cache.kept_by_layer().values() for row in positions])
    named = tuple(Head(layer=layer, head=head) for layer in range(layers) for head in range(heads))
    replayed = replay(ArrayTrace(weights, heads=named), choice)
    for now, kept in enumerate(live):
        yield kept, [replayed.kept(now, row).tolist() for row in range(layers * heads)]


@contextmanager
def _recording(weights: NDArray[np.float32]) -> Iterator[None]:
    """Write down what the policy is shown: `weights` is `[layers * heads, tokens, positions]`."""
    done = 0  # rows of this token that were shown already: layers that get the same of the budget come together

    def recorded(signal: Any, slots: Any, position: int, given: Any) -> Any:
        nonlocal done
        rows = slice(done, done + len(slots.positions))
        done = rows.stop % len(weights)
        if given is not None:
            np.put_along_axis(weights[rows, position], slots.positions, given[:, : slots.positions.shape[1]], axis=1)
        return step(signal, slots, position, given)

    holdings_module.step = recorded
    try:
        yield
    finally:
        holdings_module.step = step
