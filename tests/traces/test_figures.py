"""The published figures of the canonical trace to the last digit, and the further ones of the specification."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from headwater.policies import H2O, Policy, PyramidKV, Scissorhands, SnapKV, StreamingLLM, policy
from headwater.traces import ArrayTrace, Replay, canonical_trace, replay_all
from headwater.traces.result import round6
from tests.traces.published import BUDGETS, load

NAMES = list(load("bench")["metrics"])

FURTHER = [
    # policy, retained mass, recall, eviction calls or None where it is tokens - budget
    (H2O(budget=256, recent_window=16), 0.484690, 0.680567, None),
    (H2O(budget=256, recent_window=64), 0.771237, 0.882339, None),
    (H2O(budget=512, recent_window=64), 0.826413, 0.909793, None),
    (H2O(budget=1024, recent_window=64), 0.888214, 0.945091, None),
    (H2O(budget=256, recent_window=128), 0.774481, 0.890183, None),
    (Scissorhands(budget=256, recent_window=64), 0.776694, 0.886261, None),
    (Scissorhands(budget=512, recent_window=64), 0.826339, 0.902125, None),
    (Scissorhands(budget=1024, recent_window=64), 0.895456, 0.945091, None),
    (PyramidKV(budget=512, layer=2, num_layers=4), 0.819346, 0.901949, 35),
    (PyramidKV(budget=512, layer=3, num_layers=4), 0.803184, 0.898027, 12),
]


def replays(*policies: Policy[Any]) -> list[Replay]:
    return replay_all(canonical_trace(), policies)


@pytest.fixture(scope="module")
def grid() -> dict[tuple[str, int], Replay]:
    made = [policy(name, budget=budget) for name in NAMES for budget in BUDGETS]
    return {(out.policy.name, out.policy.budget): out for out in replays(*made)}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_the_published_figures(grid: dict[tuple[str, int], Replay], name: str, budget: int) -> None:
    out = grid[name, budget]
    assert {
        "retainedAttentionMass": out.retained_attention_mass,
        "heavyHitterRecall": out.heavy_hitter_recall,
        "evictionCalls": out.eviction_calls,
    } == load("bench")["metrics"][name][str(budget)]


def test_the_published_figures_are_63(grid: dict[tuple[str, int], Replay]) -> None:
    assert 3 * len(grid) == 63


def test_what_the_windows_keep_at_256(grid: dict[tuple[str, int], Replay]) -> None:
    assert f"{grid['sliding-window', 256].retained_attention_mass:.4f}" == "0.5966"
    assert f"{grid['streaming-llm', 256].retained_attention_mass:.4f}" == "0.7367"


@pytest.mark.parametrize(("choice", "mass", "recall", "calls"), FURTHER, ids=lambda value: str(value))
def test_further_figures(choice: Policy[Any], mass: float, recall: float, calls: int | None) -> None:
    out = replays(choice)[0]
    assert (out.retained_attention_mass, out.heavy_hitter_recall) == (mass, recall)
    assert out.eviction_calls == (4096 - choice.budget if calls is None else calls)


def test_shallow_layers_of_pyramidkv_are_snapkv(grid: dict[tuple[str, int], Replay]) -> None:
    for out in replays(*(PyramidKV(budget=512, layer=layer, num_layers=4) for layer in (0, 1))):
        assert np.array_equal(out.left, grid["snapkv", 512].left)


REMEMBERED = """
import json
import numpy as np
from headwater.policies import H2O, Scissorhands, Tova
from headwater.traces import canonical_trace
from headwater.traces.rule_run import RuleRun

trace = canonical_trace()
def driven(choice):
    run = RuleRun(trace, choice)
    for chunk in trace.chunks():
        run.advance(0, chunk, np.full((1, len(chunk.steps), 32), -1, dtype=np.int32))
    return choice, run.slots(0)

h2o, sums = driven(H2O(budget=256))
scissorhands, votes = driven(Scissorhands(budget=256))
tova, last = driven(Tova(budget=256))
print(json.dumps({
    "h2o": [h2o.score_of(sums, position).item() for position in range(4)],
    "scissorhands": [scissorhands.votes_of(votes, position).item() for position in range(4)],
    "tova": tova.last_attention_of(last, 0).item(),
    "tova holds": last.positions[0].tolist(),
}))
"""


def test_what_rules_remember_in_the_end(grid: dict[tuple[str, int], Replay]) -> None:
    """In a process of its own: here every call has its shapes checked, which would take many times as long."""
    done = subprocess.run([sys.executable, "-c", REMEMBERED], capture_output=True, text=True, check=True)
    remembered = json.loads(done.stdout)
    assert remembered["h2o"] == [249.5445257127285, 187.18170316144824, 125.34195877052844, 63.68656899407506]
    assert remembered["scissorhands"] == [4094, 4093, 4091, 4083]
    assert remembered["tova"] == 0.06001221016049385
    assert remembered["tova holds"] == grid["tova", 256].kept(4095).tolist()
    assert set(remembered["tova holds"]) >= {0, 1, 2, 3, *range(4031, 4095)}


def same_in_the_end(one: Replay, other: Replay) -> None:
    assert np.array_equal(one.kept(4095), other.kept(4095))
    assert one.retained_attention_mass == other.retained_attention_mass
    assert one.heavy_hitter_recall == other.heavy_hitter_recall


def test_tova_is_snapkv_without_pooling_on_this_trace(grid: dict[tuple[str, int], Replay]) -> None:
    for out in replays(*(SnapKV(budget=budget, pool_kernel=1) for budget in BUDGETS)):
        same_in_the_end(out, grid["tova", out.policy.budget])


def test_the_observed_steps_of_snapkv_do_not_matter_on_this_trace(grid: dict[tuple[str, int], Replay]) -> None:
    for out in replays(*(SnapKV(budget=budget, obs_window=steps) for budget in BUDGETS for steps in (1, 4, 64))):
        same_in_the_end(out, grid["snapkv", out.policy.budget])


def test_streaming_llm_without_sinks_is_the_sliding_window(grid: dict[tuple[str, int], Replay]) -> None:
    for out in replays(*(StreamingLLM(budget=budget, sinks=0) for budget in BUDGETS)):
        assert np.array_equal(out.left, grid["sliding-window", out.policy.budget].left)


def test_snapkv_that_observes_everything_unpooled_is_h2o(grid: dict[tuple[str, int], Replay]) -> None:
    out = replays(SnapKV(budget=256, obs_window=4095, pool_kernel=1))[0]
    assert np.array_equal(out.left, grid["h2o", 256].left)


def test_with_room_for_all_nothing_is_lost() -> None:
    made = [policy(name, budget=budget) for name in [*NAMES, "full", "random"] for budget in (4096, 5000)]
    for out in replays(*made):
        assert (out.retained_attention_mass, out.heavy_hitter_recall, out.eviction_calls) == (1, 1, 0)


@pytest.mark.parametrize("by_rule", [False, True])
def test_of_equal_weights_the_lower_positions_are_heavy(by_rule: bool) -> None:
    """60 positions have the same weight, so the heavy hitters are 0 to 31, and a window of 10 has lost most of them.

    Were it the higher positions, the window would have kept 10 of them at every step, and the recall would be another.
    """
    tokens = 61
    weights = np.tril(np.full((tokens, tokens), 0.25))
    out = replay_all(ArrayTrace(weights), [policy("sliding-window", budget=10)], by_rule=by_rule)[0]
    kept = [
        sum(position in range(max(0, step - 10), step) for position in range(min(32, step))) for step in range(1, 61)
    ]
    assert out.hits[0].tolist() == kept
    assert out.heavy_hitter_recall == round6(sum(kept) / sum(min(32, step) for step in range(1, 61)))
