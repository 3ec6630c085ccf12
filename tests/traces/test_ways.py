"""Every way of computing a replay gives the same: the rule, the kernel, the closed form, and the slow twin."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.policies import H2O, POLICIES, Policy, PyramidKV, SlidingWindow, SnapKV, StreamingLLM, policy
from headwater.traces import ArrayTrace, Head, Replay, Trace, canonical_trace, replay, replay_all
from tests.reference import replay_policies as twins
from tests.reference.replay_harness import Outcome, heavy_hitters
from tests.reference.replay_harness import replay as replay_slowly

WAY = dict.fromkeys(POLICIES, "compiled") | dict.fromkeys(("full", "sliding-window", "streaming-llm"), "closed form")
SHAPES = {
    "many ties": lambda random, shape: random.choice([0.0, 0.0625, 0.125, 0.25, 1.0], shape),
    "zeros of both signs": lambda random, shape: random.choice([0.0, -0.0, 0.5], shape),
    "no two equal": lambda random, shape: random.lognormal(0, 2, shape),
    "one step apart": lambda random, shape: np.float32(0.1) + random.integers(0, 4, shape) * 2.0**-27,
    "sums that depend on their order": lambda random, shape: random.choice([0.5, 1.0, 3.0, 2.0**53, 2.0**54], shape),
}


def trace_of(shape: str, tokens: int, layers: list[int], seed: int) -> ArrayTrace:
    """Rows of the given layers; what lies above the diagonal is no weight, and must not be read."""
    random = np.random.default_rng(seed)
    weights = SHAPES[shape](random, (len(layers), tokens, tokens)).astype(np.float32)
    weights[:, ~np.tri(tokens, dtype=bool)] = np.nan
    return ArrayTrace(weights, heads=tuple(Head(layer=layer, head=index) for index, layer in enumerate(sorted(layers))))


def draw_policy(data: st.DataObject, kind: type[Policy[Any]], tokens: int) -> Policy[Any]:
    """Any parameters that fit together, from a budget of 1 to more than everything."""

    def number(least: int, most: int, label: str) -> int:
        return data.draw(st.integers(least, most), label=label)

    budget = number(1, tokens + 2, "budget")
    sinks = number(0, min(budget - 1, 9), "sinks")
    layers = number(1, 4, "num_layers")
    drawn = {
        "budget": budget + tokens if kind.name == "full" else budget,
        "sinks": sinks,
        "recent_window": number(0, budget - sinks - 1, "recent_window"),
        "obs_window": number(1, tokens + 2, "obs_window"),
        "pool_kernel": 2 * number(0, 6, "reach of the pooling") + 1,
        "num_layers": layers,
        "layer": number(0, layers - 1, "layer"),
        "pyramid_ratio": number(1, 5, "pyramid_ratio"),
        "seed": number(0, 2**64 - 1, "seed"),
    }
    return kind(**{field.name: drawn[field.name] for field in fields(kind)})


def twin_of(choice: Policy[Any]) -> twins.Policy:
    return twins.POLICIES[choice.name](**{field.name: getattr(choice, field.name) for field in fields(choice)})


def slowly(trace: Trace, choice: Policy[Any], row: int) -> Outcome:
    whole = trace.whole()[row]
    steps = [whole[step - 1, :step] for step in range(1, trace.tokens)]
    heavy = [heavy_hitters(weights) for weights in steps]
    layer = choice.at_layer(trace.layers.index(trace.heads[row].layer), len(trace.layers))
    own = [float(whole[step - 1, step]) for step in range(1, trace.tokens)]
    return replay_slowly(steps, heavy, twin_of(layer), layer.budget, own)


def assert_same(one: Replay, other: Replay, *, mass: float = 0.0) -> None:
    """Kept sets, hits and evictions equal; the mass too, or as far as `mass` allows, relative to what there was."""
    assert np.array_equal(one.left, other.left)
    assert np.array_equal(one.hits, other.hits)
    assert np.array_equal(one.evictions, other.evictions)
    assert np.allclose(one.mass, other.mass, rtol=0, atol=mass * (1 + other.mass.max(initial=0)))


def assert_all_ways_agree(trace: Trace, policies: list[Policy[Any]], chunk_bytes: tuple[int, int]) -> None:
    fast = replay_all(trace, policies, chunk_bytes=chunk_bytes[0])
    rules = replay_all(trace, policies, chunk_bytes=chunk_bytes[1], by_rule=True)
    for choice, ours, rule in zip(policies, fast, rules, strict=True):
        assert (ours.way, rule.way) == (WAY[choice.name], "rule")
        assert_same(ours, rule, mass=1e-12 if ours.way == "closed form" else 0.0)
        if choice.name not in twins.POLICIES:
            continue
        for row in range(trace.rows):
            twin = slowly(trace, choice, row)
            assert rule.left[row].tolist() == twin.left
            assert rule.hits[row].tolist() == twin.hits
            assert rule.evictions[row] == twin.evictions
            assert rule.mass[row].tolist() == twin.mass


@pytest.mark.parametrize("kind", POLICIES.values(), ids=lambda kind: kind.name)
@settings(max_examples=50)
@given(data=st.data())
def test_every_way_gives_the_same(kind: type[Policy[Any]], data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 48), label="tokens")
    trace = trace_of(
        data.draw(st.sampled_from(sorted(SHAPES)), label="weights"),
        tokens,
        data.draw(st.sampled_from([[0], [0, 0], [0, 1, 1], [2, 5, 9]]), label="layers"),
        data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    step_bytes = 4 * trace.rows * tokens
    sizes = st.sampled_from([1, 2 * step_bytes, 7 * step_bytes, 1 << 30])
    chunk_bytes = data.draw(sizes, label="chunk"), data.draw(sizes, label="chunk of the rule")
    assert_all_ways_agree(trace, [draw_policy(data, kind, tokens)], chunk_bytes)


@pytest.mark.parametrize("shape", ["many ties", "no two equal", "sums that depend on their order"])
def test_every_way_gives_the_same_at_the_defaults(shape: str) -> None:
    """Long enough for the default parameters to matter, all policies and several budgets in one pass."""
    trace = trace_of(shape, 130, [0, 1, 1], seed=1)
    made = [policy(name, budget=budget) for name in POLICIES if name != "full" for budget in (40, 100)]
    assert_all_ways_agree(trace, [*made, policy("full")], (9 * 4 * 3 * 130, 1 << 30))


def test_the_size_of_the_chunks_does_not_matter() -> None:
    trace = canonical_trace(tokens=400)
    made = [policy(name, budget=64) for name in POLICIES if name != "full"]
    whole = replay_all(trace, made)
    for chunk_bytes in (1, 1000, 4 * 400 * 9):
        for one, other in zip(whole, replay_all(trace, made, chunk_bytes=chunk_bytes), strict=True):
            assert_same(one, other)


def test_layers_get_their_share_of_pyramidkv() -> None:
    trace = trace_of("no two equal", 200, [0, 0, 1, 2, 2], seed=3)
    out = replay(trace, "pyramidkv", budget=60)
    held = [len(out.kept(199, row)) for row in range(5)]
    assert held == [96, 96, 60, 33, 33]  # 2 * 60 * 4 / 5, 60, and recent_window + 1
    assert out.way == "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving(SlidingWindow):
    """A window half as long in every layer after the first."""

    name: ClassVar[str] = "halving"

    def at_layer(self, depth: int, layers: int) -> Policy[Any]:
        return SlidingWindow(budget=self.budget // 2 if depth else self.budget)


@pytest.mark.parametrize(("choice", "way"), [(Halving(budget=40), "closed form"), (PyramidKV(budget=48), "compiled")])
def test_no_piece_of_many_rows_has_two_layers(choice: Policy[Any], way: str) -> None:
    """130 rows go in pieces of two, and the first layer ends in the middle of one."""
    trace = trace_of("no two equal", 70, [0] * 65 + [1] * 65, seed=4)
    fast = replay(trace, choice)
    assert fast.way == way
    assert_same(fast, replay_all(trace, [choice], by_rule=True)[0], mass=1e-12)
    assert len(fast.kept(69, 64)) > len(fast.kept(69, 65))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient(H2O):
    """Derived from a policy with a kernel, with another rule."""

    name: ClassVar[str] = "patient"

    def scores(self, slots: Any) -> NDArray[np.float64]:
        return -slots.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(SnapKV):
    """Another policy at every second layer."""

    name: ClassVar[str] = "mixed"

    def at_layer(self, depth: int, layers: int) -> Policy[Any]:
        return SlidingWindow(budget=self.budget) if depth % 2 else SnapKV(budget=self.budget)


def test_a_policy_of_your_own_goes_by_its_rule() -> None:
    """Though it is derived from one that has a kernel."""
    trace = canonical_trace(tokens=200)
    out = replay(trace, Patient(budget=64))
    assert out.way == "rule"
    assert not np.array_equal(out.left, replay(trace, "h2o", budget=64).left)


def test_a_policy_that_differs_between_layers_goes_by_rule_unless_one_way_suits_all() -> None:
    trace = trace_of("no two equal", 100, [0, 1], seed=2)
    out = replay(trace, Mixed(budget=40))
    assert out.way == "rule"
    assert np.array_equal(out.left[0], replay(trace, "snapkv", budget=40).left[0])
    assert np.array_equal(out.left[1], replay(trace, "sliding-window", budget=40).left[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(StreamingLLM):
    """A window of somebody else's: it says what it does, so it needs no kernel."""

    name: ClassVar[str] = "pinned"


def test_a_window_of_your_own_is_replayed_in_closed_form() -> None:
    out = replay(canonical_trace(tokens=200), Pinned(budget=64))
    assert out.way == "closed form"
    assert_same(out, replay(canonical_trace(tokens=200), "streaming-llm", budget=64))


def test_without_numba_policies_go_by_their_rule() -> None:
    """What needs no kernel is in closed form all the same; the figures are those with numba."""
    code = """
        import sys
        sys.modules["numba"] = None
        import headwater as hw
        from headwater.traces import replay_all
        trace = hw.canonical_trace(tokens=300)
        made = [hw.policy(name, budget=64) for name in ("h2o", "tova", "snapkv", "random", "streaming-llm")]
        for out in replay_all(trace, made):
            print(out.policy.name, out.way, out.retained_attention_mass, out.heavy_hitter_recall, sep=",")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert [way for _, way, _, _ in lines] == ["rule"] * 4 + ["closed form"]
    for name, _, mass, recall in lines:
        out = replay(canonical_trace(tokens=300), name, budget=64)
        assert (out.retained_attention_mass, out.heavy_hitter_recall) == (float(mass), float(recall))
