"""What verifies the slow twins: the published cases, numbers, bits, hashes and figures, and nothing of ours."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference import replay_trace
from tests.reference.replay_harness import replay
from tests.reference.replay_policies import POLICIES
from tests.traces.published import BUDGETS, FNV_START, FOLDER, HASH_AFTER, fnv1a, load

VECTORS = [
    pytest.param(path.stem, case, id=f"{path.stem}: {case['name']}")
    for path in sorted(FOLDER.glob("*.json"))
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]
]


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)


@pytest.mark.parametrize(("name", "case"), VECTORS)
def test_the_twin_of_a_policy_passes_the_published_cases(name: str, case: dict[str, Any]) -> None:
    twin = POLICIES[name](**{snake(key): value for key, value in case["params"].items()})
    for call in case["steps"]:
        got = getattr(twin, snake(call["call"]))(*call["args"])
        if "expect" in call:
            assert got == call["expect"], call


@pytest.mark.parametrize("name", POLICIES)
def test_the_twin_gives_the_published_figures(
    name: str, plain_steps: list[NDArray[np.float32]], plain_heavy: list[NDArray[np.int64]]
) -> None:
    for budget in BUDGETS:
        out = replay(plain_steps, plain_heavy, POLICIES[name](budget=budget), budget)
        assert {
            "retainedAttentionMass": out.retained_attention_mass,
            "heavyHitterRecall": out.heavy_hitter_recall,
            "evictionCalls": out.evictions,
        } == load("bench")["metrics"][name][str(budget)]


def test_the_twin_of_the_trace_has_the_published_bits_and_hashes(plain_steps: list[NDArray[np.float32]]) -> None:
    assert [w.view(np.uint32).tolist() for w in plain_steps[:10]] == load("trace")["firstStepBits"]
    state, hashes = FNV_START, dict[int, int]()
    for step, weights in enumerate(plain_steps, start=1):
        state = fnv1a(state, weights.view(np.uint8))
        if step in HASH_AFTER:
            hashes[step] = state
    assert hashes == HASH_AFTER


@pytest.mark.parametrize("numbers", load("rng")["seeds"], ids=lambda numbers: f"seed {numbers['seed']}")
def test_the_generator_of_the_twin_gives_the_published_numbers(numbers: dict[str, Any]) -> None:
    state = replay_trace.seeded(numbers["seed"])
    assert [replay_trace.next_u32(state) for _ in numbers["nextU32"]] == numbers["nextU32"]
    for draws in numbers["nextInt"]:
        state = replay_trace.seeded(numbers["seed"])
        assert [replay_trace.next_int(state, draws["bound"]) for _ in draws["values"]] == draws["values"]
