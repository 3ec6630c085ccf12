"""The canonical trace: every bit of it, and that it is made in pieces."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.errors import UsageError
from headwater.traces.canonical import canonical_trace
from headwater.traces.generator import Generator
from tests.reference.replay_trace import decode_trace
from tests.traces.published import FNV_START, HASH_AFTER, fnv1a, load

DRAWS = {
    # step: calls of next_int, first positions drawn, last
    128: (49, [27, 56, 24, 54], 4),
    512: (32, [338, 352, 14, 16], 318),
    1024: (33, [314, 715, 784, 941], 525),
    1536: (32, [62, 898, 399, 1049], 1188),
    2048: (32, [1492, 121, 216, 702], 1312),
    2560: (32, [458, 1183, 1495, 58], 1087),
    3072: (32, [2814, 2963, 2329, 2521], 465),
    3584: (32, [2087, 1164, 2215, 2797], 2736),
}


def steps_of(tokens: int = 4096, seed: int = 7, chunk_bytes: int = 1 << 22) -> list[NDArray[np.float32]]:
    chunks = canonical_trace(tokens=tokens, seed=seed).chunks(chunk_bytes)
    return [chunk.weights[0, step - chunk.first, :step] for chunk in chunks for step in chunk.steps]


def test_the_first_steps_have_the_published_bits() -> None:
    assert [w.view(np.uint32).tolist() for w in steps_of(tokens=11)] == load("trace")["firstStepBits"]


def test_the_trace_has_the_published_hashes() -> None:
    trace, state, hashes = canonical_trace(), FNV_START, dict[int, int]()
    assert (trace.name, trace.tokens, trace.rows) == ("decode-4096", 4096, 1)
    for step, weights in enumerate(steps_of(), start=1):
        state = fnv1a(state, weights.copy().view(np.uint8))
        if step in HASH_AFTER:
            hashes[step] = state
    assert hashes == HASH_AFTER
    assert hashes[4095] == load("trace")["hash"]


@pytest.mark.parametrize("step", DRAWS)
def test_heavy_positions_are_drawn_as_specified(step: int) -> None:
    _, first, last = DRAWS[step]
    drawn = canonical_trace().heavy(step).tolist()
    assert (drawn[:4], drawn[-1], len(set(drawn))) == (first, last, 32)
    assert canonical_trace().heavy(step + 127).tolist() == drawn
    assert canonical_trace().heavy(step - 1).tolist() != drawn


def test_the_draws_take_the_specified_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[int, int] = {}
    plain = Generator.next_int

    def counted(self: Generator, bound: int) -> int:
        calls[bound + 68] = calls.get(bound + 68, 0) + 1
        return plain(self, bound)

    monkeypatch.setattr(Generator, "next_int", counted)
    canonical_trace()
    assert calls == {step: count for step, (count, _, _) in DRAWS.items()}


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 700 * 3, 4 * 700 * 65, 1 << 30])
def test_the_size_of_the_chunks_does_not_matter(chunk_bytes: int) -> None:
    for ours, plain in zip(
        steps_of(tokens=700, seed=3, chunk_bytes=chunk_bytes), decode_trace(tokens=700, seed=3), strict=True
    ):
        assert ours.tobytes() == plain.tobytes()


def test_no_token_pays_to_itself_or_to_what_comes_after() -> None:
    for chunk in canonical_trace(tokens=200).chunks(1 << 12):
        for step in chunk.steps:
            assert not chunk.weights[0, step - chunk.first, step:].any()


def test_it_is_never_in_memory_as_a_whole() -> None:
    """All of it would be 33 MB packed, 67 MB as a square; chunks stay small even for those who allow large ones."""
    tracemalloc.start()
    for chunk in canonical_trace().chunks(1 << 30):
        assert chunk.weights.nbytes <= 4 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14e6


def test_it_is_there_as_a_whole_for_those_who_ask() -> None:
    whole = canonical_trace(tokens=300).whole()
    assert whole.shape == (1, 299, 300)
    assert np.array_equal(whole[0, 298, :299], list(decode_trace(tokens=300))[-1])


@pytest.mark.parametrize("tokens", [1, 2, 5, 65, 128, 129, 130])
def test_short_traces(tokens: int) -> None:
    assert [w.tobytes() for w in steps_of(tokens=tokens)] == [w.tobytes() for w in decode_trace(tokens=tokens)]


def test_other_seeds_draw_other_positions() -> None:
    assert canonical_trace(seed=8).heavy(128).tolist() != canonical_trace().heavy(128).tolist()
    assert canonical_trace(tokens=99, seed=8).name == "decode-99, seed 8"


@pytest.mark.parametrize("tokens", [0, -1, True, 4096.0])
def test_a_length_is_a_number_of_tokens(tokens: int) -> None:
    with pytest.raises(UsageError, match="a trace has at least 1 token, got tokens="):
        canonical_trace(tokens=tokens)


def test_a_seed_is_an_integer() -> None:
    with pytest.raises(UsageError, match=r"a seed is an integer, got 7\.0"):
        canonical_trace(seed=7.0)  # type: ignore[arg-type]
