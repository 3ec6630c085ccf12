"""Heavy hitters and the check of weights, both ways: in NumPy and compiled, against a stable sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.traces import heavy, kernels
from tests.reference.replay_harness import heavy_hitters

Weights = NDArray[np.float32]

both = pytest.mark.parametrize("find", [heavy.find_heavy, kernels.find_heavy], ids=["numpy", "compiled"])

SHAPES: dict[str, Callable[[np.random.Generator, int], NDArray[np.floating]]] = {
    "heavy tails": lambda random, count: random.lognormal(0, 3, count),
    "noise": lambda random, count: random.random(count),
    "few values": lambda random, count: random.choice([0.0, 0.125, 0.25, 0.5], count),
    "nearly all zero": lambda random, count: random.random(count) * (random.random(count) < 20 / count),
    "all equal": lambda random, count: np.full(count, 0.25),
    "all zero": lambda random, count: np.zeros(count),
    "zeros of both signs": lambda random, count: random.choice([0.0, -0.0, 0.5], count),
    "ascending": lambda random, count: np.arange(count) / count,
    "descending": lambda random, count: np.arange(count)[::-1] / count,
    "from the smallest to the largest float": lambda random, count: 10.0 ** random.uniform(-45, 38, count),
    "one step apart": lambda random, count: np.float32(0.5) + random.integers(0, 60, count) * 2.0**-24,
}


def found(find: Callable[..., tuple[int, int]], weights: Weights, first: int) -> NDArray[np.int32]:
    out = np.full((*weights.shape[:2], 32), 99, dtype=np.int32)
    assert find(weights, first, out) == (-1, -1)
    return out


@both
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [1, 30, 31, 33, 63, 64, 65, 500, 2047])
def test_the_heavy_hitters_are_the_first_of_a_stable_sort(
    find: Callable[..., tuple[int, int]], shape: str, first: int
) -> None:
    random = np.random.default_rng(first)
    rows, steps = 2, 5
    weights = np.stack([[SHAPES[shape](random, first + steps) for _ in range(steps)] for _ in range(rows)])
    out = found(find, weights.astype(np.float32), first)
    for row in range(rows):
        for index in range(steps):
            top = np.sort(heavy_hitters(weights[row, index, : first + index].astype(np.float32)))
            assert out[row, index, : len(top)].tolist() == top.tolist()
            assert (out[row, index, len(top) :] == -1).all()


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 200), levels=st.integers(1, 60))
def test_both_ways_agree_on_ties(seed: int, count: int, levels: int) -> None:
    """The compiled way starts from the threshold of the step before, which here is anything."""
    random = np.random.default_rng(seed)
    scale = 2.0 ** random.integers(-20, 20, (3, 4, 1))
    weights = (random.integers(0, levels, (3, 4, count + 4)) * scale).astype(np.float32)
    ours = found(kernels.find_heavy, weights, count)
    assert ours.tolist() == found(heavy.find_heavy, weights, count).tolist()


@both
@pytest.mark.parametrize("bad", [-1e-30, np.nan, np.inf, -np.inf, -np.nan], ids=str)
@pytest.mark.parametrize("place", [0, 17, 49, 50], ids=lambda place: f"position {place}")
def test_what_is_no_weight_is_found(find: Callable[..., tuple[int, int]], bad: float, place: int) -> None:
    """The step's own weight, the last one, is checked too; the weights of rows and steps before it are good."""
    weights = np.full((3, 4, 60), 0.125, dtype=np.float32)
    weights[1, 2, place] = bad
    assert find(weights, 48, np.empty((3, 4, 32), dtype=np.int32)) == (1, 2)


@both
def test_what_lies_beyond_the_step_is_not_read(find: Callable[..., tuple[int, int]]) -> None:
    weights = np.full((1, 3, 60), 0.125, dtype=np.float32)
    clean = found(find, weights, 40)
    for index in range(3):
        weights[0, index, 41 + index :] = [np.nan, -1, 7][index]
    assert found(find, weights, 40).tolist() == clean.tolist()
