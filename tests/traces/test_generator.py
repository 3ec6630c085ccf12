"""The random generator against the published numbers, every one of them."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.errors import UsageError
from headwater.traces.generator import Generator, mix
from tests.traces.published import load

SEEDS = load("rng")["seeds"]
every_seed = pytest.mark.parametrize("numbers", SEEDS, ids=lambda numbers: f"seed {numbers['seed']}")


def test_the_published_numbers_are_424() -> None:
    words = sum(len(numbers["nextU32"]) for numbers in SEEDS)
    floats = sum(len(numbers["nextFloat"]) for numbers in SEEDS)
    integers = sum(len(draws["values"]) for numbers in SEEDS for draws in numbers["nextInt"])
    assert words + floats + integers + len(load("rng")["mix32"]) == 424


@every_seed
def test_words(numbers: dict[str, Any]) -> None:
    generator = Generator(numbers["seed"])
    assert [generator.next_u32() for _ in numbers["nextU32"]] == numbers["nextU32"]


@every_seed
def test_floats(numbers: dict[str, Any]) -> None:
    generator = Generator(numbers["seed"])
    assert [generator.next_float() for _ in numbers["nextFloat"]] == [float(text) for text in numbers["nextFloat"]]


@every_seed
def test_integers(numbers: dict[str, Any]) -> None:
    for draws in numbers["nextInt"]:
        generator = Generator(numbers["seed"])
        assert [generator.next_int(draws["bound"]) for _ in draws["values"]] == draws["values"]


def test_mix() -> None:
    for pair in load("rng")["mix32"]:
        assert mix(pair["input"]) == pair["output"]


def test_seeds_count_modulo_2_to_the_32() -> None:
    assert Generator(7 + (1 << 32)).next_u32() == Generator(7).next_u32() == Generator(7 - (1 << 32)).next_u32()


def test_the_largest_bound_gives_the_word_itself() -> None:
    assert Generator(7).next_int(1 << 32) == Generator(7).next_u32()
    assert Generator(7).next_int(1) == 0


def test_words_that_would_favour_small_results_are_drawn_again() -> None:
    """Of 2^32 words the first 2^31 - 2 are refused for this bound, so every second draw takes more than one word."""
    words, generator, bound = Generator(1), Generator(1), (1 << 31) + 2
    low = (1 << 31) - 2
    expected = [word % bound for word in (words.next_u32() for _ in range(64)) if word >= low]
    assert len(expected) < 48
    assert [generator.next_int(bound) for _ in expected] == expected


@pytest.mark.parametrize("bound", [0, -1, (1 << 32) + 1, True, 2.0])
def test_a_bound_outside_the_words_is_refused(bound: int) -> None:
    with pytest.raises(UsageError, match=r"between 1 and 2\^32, got"):
        Generator(7).next_int(bound)


@pytest.mark.parametrize("seed", [True, 7.0, "7"])
def test_a_seed_is_an_integer(seed: int) -> None:
    with pytest.raises(UsageError, match="a seed is an integer, got"):
        Generator(seed)
