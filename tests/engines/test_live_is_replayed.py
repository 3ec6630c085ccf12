"""Policies that look at attention keep, live, what a replay of that very attention keeps: every head, every step."""

from __future__ import annotations

import pytest

from headwater.policies import policy
from tests import tiny
from tests.cache.test_policy_cache import LOOKING, SMALL
from tests.reference.live_kept import live_and_replayed

LENGTH, BUDGET = 90, 16


@pytest.mark.parametrize("reindex", ["compact", "none"])
@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_the_kept_set_of_every_head_is_the_replayed_one(family: str, name: str, reindex: str):
    choice, tokens = policy(name, budget=BUDGET, sinks=2, **SMALL[name]), tiny.tokens(LENGTH)[0].tolist()
    steps = list(live_and_replayed(tiny.build(family), choice, tokens, reindex=reindex))
    assert len(steps) == LENGTH
    for now, (live, replayed) in enumerate(steps):
        assert live == replayed, now
    assert max(map(len, steps[-1][0])) < LENGTH
