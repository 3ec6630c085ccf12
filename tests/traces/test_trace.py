"""The seam between attention and replay: arrays as traces, rows and layers, chunks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.errors import UsageError
from headwater.traces import ArrayTrace, Head
from headwater.traces.trace import steps_per_chunk


def weights(rows: int, tokens: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).random((rows, tokens, tokens), dtype=np.float32)


def heads(*layers: int) -> tuple[Head, ...]:
    return tuple(Head(layer=layer, head=index) for index, layer in enumerate(layers))


def test_one_head_may_come_without_an_axis_for_rows() -> None:
    trace = ArrayTrace(weights(1, 5)[0])
    assert (trace.rows, trace.tokens, trace.steps) == (1, 5, 4)
    assert trace.heads == (Head(layer=0, head=0),)


@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_chunks_are_all_steps_in_order(steps: int) -> None:
    given = weights(3, 8)
    seen = 0
    for chunk in ArrayTrace(given).chunks(steps * 3 * 8 * 4):
        assert chunk.weights.nbytes <= steps * 3 * 8 * 4
        for step in chunk.steps:
            seen += 1
            assert step == seen
            assert np.array_equal(chunk.weights[:, step - chunk.first, : step + 1], given[:, step, : step + 1])
    assert seen == 7


def test_the_whole_of_it_has_nothing_above_the_diagonal() -> None:
    given = weights(2, 6)
    whole = ArrayTrace(given).whole()
    assert whole.shape == (2, 5, 6)
    assert np.array_equal(whole, np.tril(given)[:, 1:])


def test_other_precisions_become_float32() -> None:
    given = weights(1, 4).astype(np.float16)
    assert np.array_equal(ArrayTrace(given).whole()[0, 2], given[0, 3].astype(np.float32))


def test_one_token_is_a_trace_without_steps() -> None:
    trace = ArrayTrace(weights(2, 1))
    assert (trace.steps, list(trace.chunks())) == (0, [])


def test_rows_of_a_layer_are_next_to_one_another() -> None:
    trace = ArrayTrace(weights(5, 3), heads=heads(0, 0, 4, 7, 7))
    assert trace.layers == (0, 4, 7)
    assert trace.layer_rows == (slice(0, 2), slice(2, 3), slice(3, 5))


def test_rows_that_are_not_sorted_by_layer_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mine: rows come layer by layer, ascending, got layers \[1, 0\]"):
        ArrayTrace(weights(2, 3), heads=heads(1, 0), name="mine")


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 2, 4, 4), (0, 4, 4), (2, 0, 0)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"a trace is \[rows, tokens, tokens\] or \[tokens, tokens\], got \["):
        ArrayTrace(np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize("kind", [np.int64, np.complex64, np.bool_])
def test_other_kinds_of_number_are_refused(kind: type[np.generic]) -> None:
    with pytest.raises(UsageError, match=f"a trace holds floating-point weights, got {np.dtype(kind)}"):
        ArrayTrace(np.zeros((2, 2), dtype=kind))


def test_a_name_for_every_row() -> None:
    with pytest.raises(UsageError, match="1 heads were named for 2 rows"):
        ArrayTrace(weights(2, 3), heads=heads(0))


def test_a_chunk_has_room_for_one_step_at_least() -> None:
    assert steps_per_chunk(1, rows=3, tokens=100) == 1
    assert steps_per_chunk(4 * 3 * 100 * 5, rows=3, tokens=100) == 5
    with pytest.raises(UsageError, match="chunk_bytes must be at least 1, got 0"):
        steps_per_chunk(0, rows=3, tokens=100)
