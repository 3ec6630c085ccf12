"""Policies that look at attention keep, live, what a replay of that very attention keeps: every head, every step.

The recording is taken inside the live run: what each token paid to what its head still held, put to its positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache import holdings as holdings_module
from headwater.cache.policy_cache import PolicyCache, attach
from headwater.policies import policy
from headwater.policies.incremental import step
from headwater.traces import ArrayTrace, replay
from headwater.traces.trace import Head
from tests import tiny
from tests.cache.test_policy_cache import LOOKING, SMALL

LENGTH, BUDGET = 90, 16


@pytest.mark.parametrize("reindex", ["compact", "none"])
@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_the_kept_set_of_every_head_is_the_replayed_one(
    family: str, name: str, reindex: str, monkeypatch: pytest.MonkeyPatch
):
    model, choice = tiny.build(family), policy(name, budget=BUDGET, sinks=2, **SMALL[name])
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    weights = np.zeros((layers * heads, LENGTH, LENGTH), dtype=np.float32)
    calls: list[int] = []
    done = 0  # rows of this step that were shown already: layers that get the same of the budget come together

    def recorded(signal: Any, slots: Any, position: int, given: Any) -> Any:
        nonlocal done
        calls.append(position)
        rows = slice(done, done + len(slots.positions))
        done = rows.stop % len(weights)
        if given is not None:
            np.put_along_axis(weights[rows, position], slots.positions, given[:, : slots.positions.shape[1]], axis=1)
        return step(signal, slots, position, given)

    monkeypatch.setattr(holdings_module, "step", recorded)
    cache, live = PolicyCache(model, choice, reindex=reindex), []
    with torch.inference_mode(), attach(model):
        for token in tiny.tokens(LENGTH)[0].tolist():
            model(input_ids=torch.tensor([[token]]), cache=cache)
            live.append([row.tolist() for positions in cache.kept_by_layer().values() for row in positions])
    named = tuple(Head(layer=layer, head=head) for layer in range(layers) for head in range(heads))
    replayed = replay(ArrayTrace(weights, heads=named), choice)
    for now in range(LENGTH):
        assert [replayed.kept(now, row).tolist() for row in range(layers * heads)] == live[now], now
    assert sorted(set(calls)) == list(range(LENGTH))
