"""The random policy: uniform, independent from one eviction to the next, and the same in every run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from headwater.policies import Incremental, Random
from headwater.policies.uniform import mix
from tests.policies.test_laws import kept

BUDGET = 8
EVICTIONS = 4500
# The value that chi-square exceeds once in a thousand, by degrees of freedom.
ONE_IN_A_THOUSAND = {8: 26.12, 80: 124.84}


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def slots_of_victims(policy: Random, evictions: int) -> list[int]:
    """Which of the slots held, oldest first, each eviction of a single position took."""
    row, taken = Incremental(policy), list[int]()
    for position in range(1, evictions + BUDGET):
        row.on_decode_step(position, None)
        before = kept(row)
        taken += [before.index(victim) for victim in row.evict(BUDGET)]
    return taken


@pytest.fixture(scope="module")
def taken() -> list[int]:
    return slots_of_victims(Random(budget=BUDGET), EVICTIONS)


def test_every_slot_is_as_likely_the_newest_among_them(taken: list[int]) -> None:
    assert len(taken) == EVICTIONS
    assert chi_square(np.bincount(taken, minlength=BUDGET + 1)) < ONE_IN_A_THOUSAND[8]


def test_one_eviction_says_nothing_about_the_next(taken: list[int]) -> None:
    pairs = np.zeros((BUDGET + 1, BUDGET + 1))
    for one, next_one in pairwise(taken):
        pairs[one, next_one] += 1
    assert chi_square(pairs) < ONE_IN_A_THOUSAND[80]


def test_one_seed_says_nothing_about_the_next() -> None:
    first = [slots_of_victims(Random(budget=BUDGET, seed=seed), 1)[0] for seed in range(900)]
    assert chi_square(np.bincount(first, minlength=BUDGET + 1)) < ONE_IN_A_THOUSAND[8]


def test_several_victims_at_once_are_as_likely() -> None:
    """Four of the nine go; every slot is among them equally often."""
    counts = np.zeros(BUDGET + 1)
    for seed in range(900):
        row = Incremental(Random(budget=BUDGET, seed=seed))
        for position in range(1, BUDGET + 1):
            row.on_decode_step(position, None)
        counts[row.evict(5)] += 1
    assert counts.sum() == 4 * 900
    assert chi_square(counts) < ONE_IN_A_THOUSAND[8]


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    one, again, other = (slots_of_victims(Random(budget=BUDGET, seed=seed), 100) for seed in (7, 7, 8))
    assert one == again != other


def test_the_run_is_the_same_on_every_machine(taken: list[int]) -> None:
    """Stored figures of this policy stay comparable: a change of the hash is a change of the policy."""
    assert taken[:12] == [4, 6, 3, 7, 8, 3, 5, 5, 0, 2, 8, 2]


@pytest.mark.parametrize(("state", "output"), [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)])
def test_the_hash_is_the_published_one(state: int, output: int) -> None:
    """The first number that splitmix64 gives from these two states."""
    assert mix(np.asarray([[state]], dtype=np.uint64)).tolist() == [[output]]


def test_the_largest_seed_is_taken_and_one_more_is_not() -> None:
    assert slots_of_victims(Random(budget=BUDGET, seed=2**64 - 1), 10) != slots_of_victims(Random(budget=BUDGET), 10)
    with pytest.raises(ValueError, match=r"^random: seed must be below 2\^64, got seed=18446744073709551616$"):
        Random(seed=2**64)
