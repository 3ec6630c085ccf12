"""One token of several streams at a time: every row is what it is alone. The twin feeds them one after another."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.engines.base import Engine, Stream
from headwater.errors import CacheStateError, ContextFull, UsageError
from headwater.policies.h2o import H2O
from headwater.policies.window import Window
from tests.contract.test_engines import TEXT, same

WINDOWS = [
    Window(budget=16, pins=4, block=1),
    Window(budget=16, pins=4, block=5),
    Window(budget=30, pins=0, block=8),
    Window(budget=40, pins=20, block=4),
]
LENGTHS = (1, 16, 17, 60)
"""What the rows hold before: nothing but a token, all that there is room for, one more, and long past it."""


def pairs(engine: Engine, windows: list[Window | None], lengths: tuple[int, ...]) -> tuple[list[Stream], list[Stream]]:
    """Streams for a step, and their twins."""
    out: tuple[list[Stream], list[Stream]] = [], []
    for streams in out:
        for number, (window, length) in enumerate(zip(windows, lengths, strict=True)):
            stream = engine.open(window)
            stream.feed(TEXT[number : number + length])
            streams.append(stream)
    return out


def stepped(engine: Engine, rows: list[Stream], twins: list[Stream], tokens: list[int], tolerance: float) -> None:
    came = engine.feed_together(rows, tokens)
    assert len(came) == len(rows)
    for row, twin, token, logits in zip(rows, twins, tokens, came, strict=True):
        assert isinstance(logits, np.ndarray), logits
        same(logits, twin.feed([token]), tolerance)
        assert (row.seen, row.kept.tolist()) == (twin.seen, twin.kept.tolist())


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_row_is_what_it_is_alone(engine: Engine, window: Window, tolerance: float):
    rows, twins = pairs(engine, [window] * 4, LENGTHS)
    for step in range(25):
        stepped(engine, rows, twins, TEXT[40 + step : 44 + step], tolerance)


def test_rows_of_every_kind_at_once(engine: Engine, tolerance: float):
    rows, twins = pairs(engine, [WINDOWS[0], None, WINDOWS[2], WINDOWS[3]], (20, 30, 40, 50))
    for step in range(10):
        stepped(engine, rows, twins, TEXT[40 + step : 44 + step], tolerance)


def test_rows_come_and_go(engine: Engine, tolerance: float):
    """Some rest, some are fed a message, one takes a token back, one evicts: and go on together."""
    rows, twins = pairs(engine, [WINDOWS[2]] * 4, (10, 20, 30, 40))
    for step in range(12):
        for streams in (rows, twins):
            streams[0].feed(TEXT[step : step + 5])
            if step % 3 == 0:
                streams[1].evict(3)
        chosen = [step % 4, (step + 1) % 4, (step + 2) % 4]
        stepped(engine, [rows[i] for i in chosen], [twins[i] for i in chosen], TEXT[step : step + 3], tolerance)
    for streams in (rows, twins):
        streams[3].evict(1)
        streams[3].feed(TEXT[:4])
        streams[3].rollback(2)
    stepped(engine, rows, twins, TEXT[:4], tolerance)


def test_what_was_left_for_the_next_token_can_be_scored(engine: Engine, tolerance: float):
    rows, twins = pairs(engine, [WINDOWS[1]] * 2, (20, 30))
    stepped(engine, rows, twins, TEXT[:2], tolerance)
    for row, twin in zip(rows, twins, strict=True):
        np.testing.assert_allclose(row.score(TEXT[:9]), twin.score(TEXT[:9]), rtol=0, atol=tolerance)


def test_what_goes_wrong_in_one_is_nothing_to_the_others(engine: Engine, tolerance: float):
    rows, twins = pairs(engine, [WINDOWS[0]] * 4, (20, 30, 40, 50))
    full, closed = engine.open(None, limit_tokens=3), engine.open(WINDOWS[0])
    full.feed(TEXT[:3])
    closed.close()
    came = engine.feed_together([full, rows[0], closed, *rows[1:]], [7, 1, 2, 3, 100_000, 5])
    assert isinstance(came[0], ContextFull)
    assert isinstance(came[2], CacheStateError)
    assert isinstance(came[4], UsageError)
    assert full.seen == 3
    for row, twin, token, logits in ((0, 0, 1, came[1]), (1, 1, 3, came[3]), (3, 3, 5, came[5])):
        assert isinstance(logits, np.ndarray)
        same(logits, twins[twin].feed([token]), tolerance)
        assert rows[row].kept.tolist() == twins[twin].kept.tolist()
    assert rows[2].seen == twins[2].seen
    stepped(engine, rows, twins, TEXT[:4], tolerance)


def test_logits_are_the_callers_own(engine: Engine, tolerance: float):
    rows, twins = pairs(engine, [WINDOWS[0]] * 2, (20, 30))
    for logits in engine.feed_together(rows, [1, 2]):
        assert isinstance(logits, np.ndarray)
        logits[:] = 0
    for twin, token in zip(twins, (1, 2), strict=True):
        twin.feed([token])
    for row, twin in zip(rows, twins, strict=True):
        np.testing.assert_allclose(row.score(TEXT[:2]), twin.score(TEXT[:2]), rtol=0, atol=tolerance)


def test_one_stream_twice_is_refused(engine: Engine):
    rows, _ = pairs(engine, [WINDOWS[0]] * 2, (5, 6))
    with pytest.raises(UsageError, match="3 streams were given and some are the same"):
        engine.feed_together([*rows, rows[0]], [1, 2, 3])
    assert [row.seen for row in rows] == [5, 6]
    assert engine.feed_together([], []) == []


def test_a_row_under_a_policy_that_looks_at_attention(engine: Engine, tolerance: float):
    policy = H2O(budget=12, recent_window=4)
    if not policy.needs <= engine.supplies:
        pytest.skip(f"{engine.name} shows no attention")
    made: list[list[Stream]] = []
    for _ in range(2):
        streams = [engine.open(policy), engine.open(WINDOWS[0]), engine.open(policy), engine.open(WINDOWS[1])]
        for number, stream in enumerate(streams):
            stream.feed(TEXT[number : 20 + 3 * number])
        made.append(streams)
    for step in range(6):
        stepped(engine, made[0], made[1], TEXT[step : step + 4], tolerance)
