"""What holds for a cache of every kind: a window, and every policy that picks in every head."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from headwater.cache.adapter import WindowCache
from headwater.cache.hosted import stock_cache
from headwater.cache.policy_cache import attach
from headwater.policies import POLICIES, policy
from tests import tiny

KINDS = [name for name in POLICIES if name != "full"]


def made(model: Any, name: str, budget: int) -> Any:
    """With a recent window that leaves a policy something to choose."""
    small = {"recent_window": 4} if "recent_window" in {each.name for each in fields(POLICIES[name])} else {}
    return WindowCache(model, policy=policy(name, budget=budget, **small))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_length_is_what_was_seen_on_every_layer(family: str, name: str) -> None:
    """Past the budget, and past the window of layers that slide by themselves (transformers#38156)."""
    model = tiny.build(family)
    cache = made(model, name, 40)
    with torch.inference_mode(), attach(model):
        for size in (50, 13, 1, 1, 30):
            model(input_ids=tiny.tokens(size), cache=cache)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [95] * 4
    assert cache.seen == 95
    assert cache.held < 95


@pytest.mark.parametrize("name", KINDS)
def test_a_short_text_keeps_every_token(name: str) -> None:
    """Five tokens in a budget of 64, whatever share of them a ratio would have dropped (kvpress#264)."""
    model = tiny.build("llama")
    cache, stock = made(model, name, 64), stock_cache(model)
    with torch.inference_mode(), attach(model):
        for each in (cache, stock):
            model(input_ids=tiny.tokens(3), cache=each)
        ours, theirs = (model(input_ids=tiny.tokens(2, seed=2), cache=each).logits for each in (cache, stock))
    assert cache.kept.tolist() == [0, 1, 2, 3, 4]
    assert cache.held == 5
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_the_budget_holds_after_every_token_of_an_answer(name: str) -> None:
    """An answer several times as long as the cache, in one call (streaming-llm#48)."""
    model = tiny.build("llama")
    cache = made(model, name, 40)
    shares = {layer: each.budget for layer, each in getattr(cache, "_policies", {}).items()}
    held: list[int] = []

    def check(*_: Any) -> bool:
        for layer, positions in cache.kept_by_layer().items() if shares else ():
            assert positions.shape[1] <= shares[layer]
        held.append(cache.held)
        return False

    with attach(model):
        tiny.generate(model, cache, tiny.tokens(9), 150, stopping_criteria=[check])
    assert len(held) == 150
    assert max(held) <= max(shares.values(), default=40)
    assert sum(shares.values()) <= 4 * 40
