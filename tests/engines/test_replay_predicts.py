"""What replay predicts, live generation does: the same policy, over the attention of the same run, keeps the same.

Two recordings are replayed. One is taken live, inside the generation with the policy: what each token paid to what was
still held, put to its positions; to what was gone it paid nothing. That is the honest one, since it is what the model
did, and it proves more than the kept sets: as the model can pay only to what is held, all of the mass must fall on what
the replay holds at that step, not one step earlier or later. The other is the attention of the same tokens with nothing
evicted, as `headwater trace record` takes it: what a user replays, when deciding for a policy that has not run yet. For
policies that do not look at attention both must give the kept sets of the live cache; those that do will see, live, the
first kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache.adapter import WindowCache
from headwater.engines.transformers import TransformersEngine
from headwater.policies import Policy
from headwater.policies.sliding_window import SlidingWindow
from headwater.policies.streaming_llm import StreamingLLM
from headwater.traces import ArrayTrace, Replay, replay
from headwater.traces.store import RecordedTrace, TraceWriter
from tests import tiny
from tests.engines.test_attention import NoTokenizer
from tests.traces.recordings import append, facts

PROMPT, NEW = 20, 60
LENGTH = PROMPT + NEW
POLICIES = [SlidingWindow(budget=9), SlidingWindow(budget=1), StreamingLLM(budget=16, sinks=4), StreamingLLM(budget=40)]


class Live:
    """A generation with a policy live, token by token: the tokens, what was held after each, and what each paid."""

    def __init__(self, model: Any, policy: Policy[Any]) -> None:
        window = policy.window(block=1)
        assert window is not None
        cache = WindowCache(model, window.budget, sinks=0, pinned=window.pins, block=1)
        config = model.config
        self.weights = np.zeros((config.num_hidden_layers, config.num_attention_heads, LENGTH, LENGTH), np.float32)
        self.tokens = tiny.tokens(PROMPT)[0].tolist()
        self.kept = list[list[int]]()
        for step in range(LENGTH):
            places = [*cache.ring.ledger.position_of, step]  # of each slot, and of the token itself
            with torch.inference_mode():
                output = model(input_ids=torch.tensor([[self.tokens[step]]]), cache=cache, output_attentions=True)
            self.weights[:, :, step, places] = torch.stack(output.attentions)[:, 0, :, 0].numpy()
            self.kept.append(cache.kept.tolist())
            if len(self.tokens) == step + 1 < LENGTH:
                self.tokens.append(int(output.logits[0, -1].argmax()))


@pytest.fixture(scope="module", params=["llama", "glm4", "gpt_neox"])
def model(request: pytest.FixtureRequest) -> Any:
    """Two families of grouped queries, one where every head has keys of its own."""
    return tiny.build(request.param, attention="eager")


@pytest.fixture(scope="module", params=POLICIES, ids=repr)
def policy(request: pytest.FixtureRequest) -> Policy[Any]:
    return request.param


@pytest.fixture(scope="module")
def live(model: Any, policy: Policy[Any]) -> Live:
    return Live(model, policy)


def held(replayed: Replay) -> list[list[int]]:
    """What every row holds after each step; the rows must agree."""
    rows = range(len(replayed.left))
    steps = [[replayed.kept(step, row).tolist() for row in rows] for step in range(LENGTH)]
    assert all(kept == step[0] for step in steps for kept in step)
    return [step[0] for step in steps]


def test_a_replay_of_the_live_run_keeps_what_the_live_cache_kept(live: Live, policy: Policy[Any], tmp_path: Path):
    layers, heads = live.weights.shape[:2]
    of = replace(facts(LENGTH, layers=range(layers), heads=range(heads)), tokens=tuple(live.tokens), dtype="float32")
    append(TraceWriter(tmp_path / "trace", of), live.weights, LENGTH)
    replayed = replay(RecordedTrace(tmp_path / "trace"), policy)
    assert held(replayed) == live.kept
    np.testing.assert_allclose(replayed.mass, 1, atol=1e-5)
    assert replayed.eviction_calls == (LENGTH - policy.budget) * layers * heads


def test_a_replay_of_the_whole_attention_keeps_the_same_and_loses_what_was_gone(
    live: Live, policy: Policy[Any], model: Any
):
    engine = TransformersEngine(model, NoTokenizer(), name="tiny")
    (block,) = engine.attention(live.tokens, block=LENGTH)
    replayed = replay(ArrayTrace(block.weights.reshape(-1, LENGTH, LENGTH)), policy)
    assert held(replayed) == live.kept
    first = policy.budget
    np.testing.assert_allclose(replayed.mass[:, : first - 1], 1, atol=1e-5)
    assert replayed.mass[:, first:].min() < 0.999
