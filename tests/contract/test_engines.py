"""The laws of every engine and its streams. A new engine is one line in `conftest.ENGINES`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.engines import ENGINES
from headwater.engines.base import Engine, Evicted, Stream
from headwater.engines.listing import ABOUT, ATTENTION, SESSIONS
from headwater.errors import BudgetError, CacheStateError, ContextFull, UnsupportedCall, UsageError
from headwater.policies import Incremental, Policy
from headwater.policies.sliding_window import SlidingWindow
from headwater.policies.streaming_llm import StreamingLLM
from headwater.policies.window import Window

WINDOWS = [
    Window(budget=1, pins=0, block=1),  # the smallest there is
    Window(budget=2, pins=1, block=1),
    Window(budget=16, pins=0, block=1),  # a pure window, token by token
    Window(budget=16, pins=4, block=1),  # sinks, token by token
    Window(budget=16, pins=4, block=5),  # blocks that do not divide the window
    Window(budget=16, pins=15, block=1),  # pins as large as they may be
    Window(budget=40, pins=4, block=36),  # the whole window leaves at once
    Window(budget=40, pins=0, block=8),
    Window(budget=90, pins=20, block=4),  # two thirds of the trained length
]
ROWS = pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"budget{w.budget}-pins{w.pins}-block{w.block}")
LOOSE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
TEXT = np.random.default_rng(7).integers(0, 256, 400).tolist()


class Held:
    """The slow twin of a stream's bookkeeping: a list of positions, one token at a time, by the rule's words."""

    def __init__(self, window: Window | None) -> None:
        self.window, self.seen, self.kept = window, 0, []

    def feed(self, count: int) -> None:
        for _ in range(count):
            self.kept.append(self.seen)
            self.seen += 1
            if self.window is not None and len(self.kept) > self.window.budget:
                for _ in range(self.window.block):
                    self.evict(1)

    def evict(self, count: int) -> None:
        pins = self.window.pins if self.window is not None else 0
        del self.kept[pins : pins + count]


def fed(
    engine: Engine, window: Window | None, tokens: list[int], chunk: int | None = None
) -> tuple[Stream, np.ndarray]:
    stream = engine.open(window)
    logits = np.empty(0)
    for start in range(0, len(tokens), chunk or len(tokens)):
        logits = stream.feed(tokens[start : start + (chunk or len(tokens))])
    return stream, logits


def same(left: np.ndarray, right: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


# What is seen, held and kept.


@ROWS
def test_seen_held_and_kept_are_exact_at_every_boundary(engine: Engine, window: Window):
    edges = (1, window.pins, window.budget, window.budget + window.block, 2 * window.budget)
    lengths = sorted({edge + off for edge in edges for off in (-1, 0, 1) if edge + off > 0})
    for length in lengths:
        twin = Held(window)
        twin.feed(length)
        stream, _ = fed(engine, window, TEXT[:length])
        assert (stream.seen, stream.held) == (length, len(twin.kept))
        assert stream.kept.tolist() == twin.kept
        assert stream.kept.dtype == np.int64
        assert stream.held <= window.budget


@ROWS
def test_the_budget_holds_after_every_token(engine: Engine, window: Window):
    stream, twin = engine.open(window), Held(window)
    for token in TEXT[: 2 * window.budget + 3]:
        stream.feed([token])
        twin.feed(1)
        assert stream.held <= window.budget
        assert stream.kept.tolist() == twin.kept


@pytest.mark.parametrize(
    "choice",
    [
        SlidingWindow(budget=1),
        SlidingWindow(budget=9),
        StreamingLLM(budget=9, sinks=0),
        StreamingLLM(budget=9, sinks=4),
    ],
    ids=repr,
)
def test_a_stream_holds_what_the_one_row_policy_holds(engine: Engine, choice: Policy[None]):
    stream, row = engine.open(choice.window(block=1)), Incremental(choice)
    stream.feed(TEXT[:1])
    for position in range(1, 40):
        stream.feed([TEXT[position]])
        row.on_decode_step(position, None)
        row.evict(choice.budget)
        assert stream.kept.tolist() == row.slots.positions[0].tolist()


@LOOSE
@given(st.data())
def test_any_sequence_of_calls_keeps_what_the_rule_says(engine: Engine, data: st.DataObject):
    budget = data.draw(st.integers(1, 40), label="budget")
    pins = data.draw(st.integers(0, budget - 1), label="pins")
    window = Window(budget=budget, pins=pins, block=data.draw(st.integers(1, budget - pins), label="block"))
    stream, twin = engine.open(window), Held(window)
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        if data.draw(st.booleans(), label="evict") and len(twin.kept) > pins:
            count = data.draw(st.integers(0, len(twin.kept) - pins), label="count")
            stream.evict(count)
            twin.evict(count)
        else:
            count = data.draw(st.integers(1, 60), label="tokens")
            stream.feed(TEXT[:count])
            twin.feed(count)
        assert stream.seen == twin.seen
        assert stream.kept.tolist() == twin.kept


# Logits.


@ROWS
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_neither_held_set_nor_logits_depend_on_the_chunks(engine: Engine, window: Window, chunk: int, tolerance: float):
    tokens = TEXT[:150]
    whole, expected = fed(engine, window, tokens)
    stream, logits = fed(engine, window, tokens, chunk)
    assert stream.kept.tolist() == whole.kept.tolist()
    same(logits, expected, tolerance)
    same(stream.feed(TEXT[150:157]), whole.feed(TEXT[150:157]), tolerance)


def test_a_stream_goes_on_past_the_trained_length(engine: Engine, tolerance: float):
    window = Window(budget=48, pins=4, block=4)
    tokens = TEXT[: 3 * engine.context_length]
    one, logits_one = fed(engine, window, tokens, 1)
    whole, logits_whole = fed(engine, window, tokens)
    assert one.seen == whole.seen == 3 * engine.context_length
    same(logits_one, logits_whole, 2 * tolerance)


def test_a_window_that_is_not_full_changes_nothing(engine: Engine, tolerance: float):
    _, free = fed(engine, None, TEXT[:60])
    _, windowed = fed(engine, Window(budget=60, pins=4, block=3), TEXT[:60], 9)
    same(windowed, free, tolerance)


def test_logits_come_before_the_eviction_of_their_step(engine: Engine, tolerance: float):
    """A step of budget + 1 tokens attends to all of them; only then does the oldest leave."""
    _, free = fed(engine, None, TEXT[:17])
    stream, windowed = fed(engine, Window(budget=16), TEXT[:17])
    assert stream.held == 16
    same(windowed, free, tolerance)


def test_logits_depend_on_what_is_held(engine: Engine):
    _, logits = fed(engine, Window(budget=16, pins=4), TEXT[:40])
    other = [*TEXT[:2], (TEXT[2] + 1) % 256, *TEXT[3:40]]
    _, changed_pin = fed(engine, Window(budget=16, pins=4), other)
    _, fewer_pins = fed(engine, Window(budget=16, pins=3), TEXT[:40])
    assert np.abs(logits - changed_pin).max() > 1e-3
    assert np.abs(logits - fewer_pins).max() > 1e-3


def test_logits_are_one_float_per_id(engine: Engine):
    _, logits = fed(engine, None, TEXT[:3])
    assert logits.ndim == 1 and logits.dtype == np.float32
    assert len(logits) > max(engine.stop_tokens)
    assert np.isfinite(logits).all()


# Scores.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max()
    return wide - np.log(np.exp(wide).sum())


@ROWS
def test_a_score_is_the_log_softmax_of_the_logits_before(engine: Engine, window: Window, tolerance: float):
    first, tokens = TEXT[:5], TEXT[5:120]
    slow, logits = fed(engine, window, first)
    expected = []
    for token in tokens:
        expected.append(log_softmax(logits)[token])
        logits = slow.feed([token])
    stream, _ = fed(engine, window, first)
    scores = np.concatenate([stream.score(tokens[:1]), stream.score(tokens[1:30]), stream.score(tokens[30:])])
    assert scores.dtype == np.float64
    same(scores, np.array(expected), max(tolerance, 1e-9))
    assert stream.kept.tolist() == slow.kept.tolist()
    same(stream.feed(TEXT[120:125]), slow.feed(TEXT[120:125]), tolerance)


def test_the_first_token_of_a_stream_has_no_score(engine: Engine):
    stream = engine.open(Window(budget=8))
    with pytest.raises(UsageError):
        stream.score(TEXT[:3])
    assert stream.seen == 0


# Evicting by hand.


def test_evict_drops_the_oldest_unpinned(engine: Engine):
    stream, _ = fed(engine, Window(budget=32, pins=4, block=1), TEXT[:20])
    assert stream.evict(6) == Evicted(start=4, stop=10)
    assert stream.kept.tolist() == [0, 1, 2, 3, *range(10, 20)]
    assert stream.evict(10) == Evicted(start=10, stop=20)
    assert stream.kept.tolist() == [0, 1, 2, 3]
    stream.feed(TEXT[20:22])
    assert stream.kept.tolist() == [0, 1, 2, 3, 20, 21]


def test_evict_equals_having_evicted_by_the_rule(engine: Engine, tolerance: float):
    """Dropping by hand what the rule of a smaller window drops gives the smaller window's logits."""
    small, _ = fed(engine, Window(budget=16, pins=4, block=6), TEXT[:17])
    stream, _ = fed(engine, Window(budget=30, pins=4, block=6), TEXT[:17])
    stream.evict(6)
    assert stream.kept.tolist() == small.kept.tolist()
    same(stream.feed(TEXT[17:19]), small.feed(TEXT[17:19]), tolerance)


def test_evict_refuses_more_than_is_unpinned(engine: Engine):
    stream, _ = fed(engine, Window(budget=32, pins=4), TEXT[:10])
    for count in (7, -1):
        with pytest.raises(UsageError):
            stream.evict(count)
    assert stream.held == 10
    few, _ = fed(engine, Window(budget=32, pins=4), TEXT[:3])
    with pytest.raises(UsageError):
        few.evict(1)
    free, _ = fed(engine, None, TEXT[:10])
    with pytest.raises(UsageError):
        free.evict(1)


# Rolling back.


@pytest.mark.parametrize("window", [None, Window(budget=32, pins=4, block=4), Window(budget=24, pins=4, block=8)])
def test_rollback_is_exact(engine: Engine, window: Window | None, tolerance: float):
    length = 20 if window is None else window.budget + 1
    plain, _ = fed(engine, window, TEXT[:length])
    stream, _ = fed(engine, window, TEXT[:length])
    stream.feed(TEXT[200:203])
    stream.rollback(2)
    stream.rollback(1)
    assert (stream.seen, stream.kept.tolist()) == (plain.seen, plain.kept.tolist())
    for part in (TEXT[length : length + 2], TEXT[length + 2 : length + 40]):
        same(stream.feed(part), plain.feed(part), tolerance)
        assert stream.kept.tolist() == plain.kept.tolist()


def test_rollback_to_nothing(engine: Engine, tolerance: float):
    stream, expected = fed(engine, Window(budget=16, pins=4), TEXT[:10])
    stream.rollback(10)
    assert (stream.seen, stream.held) == (0, 0)
    same(stream.feed(TEXT[:10]), expected, tolerance)


def test_rollback_of_tokens_that_evicted_is_refused(engine: Engine, tolerance: float):
    window = Window(budget=16, pins=4, block=4)
    stream, _ = fed(engine, window, TEXT[:19])  # evicts after token 17
    plain, _ = fed(engine, window, TEXT[:19])
    with pytest.raises(CacheStateError):
        stream.rollback(3)
    assert stream.kept.tolist() == plain.kept.tolist()
    same(stream.feed(TEXT[19:20]), plain.feed(TEXT[19:20]), tolerance)
    stream.rollback(3)
    assert stream.seen == 17


def test_rollback_after_one_wide_feed_knows_when_it_evicted(engine: Engine):
    window = Window(budget=16, pins=4, block=4)
    stream, _ = fed(engine, window, TEXT[:100])
    step, _ = fed(engine, window, TEXT[:100], 1)
    last = max(n for n in range(17, 101, 4))
    for one in (stream, step):
        with pytest.raises(CacheStateError):
            one.rollback(100 - last + 1)
        one.rollback(100 - last)
        assert one.seen == last


def test_rollback_refuses_impossible_counts(engine: Engine):
    stream, _ = fed(engine, None, TEXT[:10])
    for count in (11, -1):
        with pytest.raises(UsageError):
            stream.rollback(count)
    assert stream.seen == 10


def test_no_score_from_a_prediction_that_was_rolled_back(engine: Engine):
    stream, _ = fed(engine, None, TEXT[:10])
    stream.rollback(1)
    with pytest.raises(UsageError):
        stream.score(TEXT[9:12])
    assert stream.seen == 9


# Independence, limits, memory.


def test_two_streams_do_not_disturb_each_other(engine: Engine, tolerance: float):
    windows = (Window(budget=16, pins=4), Window(budget=12, pins=0, block=3))
    texts = (TEXT[:60], TEXT[100:160])
    alone = [fed(engine, window, text, 5)[1] for window, text in zip(windows, texts, strict=True)]
    streams = [engine.open(window) for window in windows]
    logits: list[np.ndarray] = []
    for start in range(0, 60, 5):
        logits = [stream.feed(text[start : start + 5]) for stream, text in zip(streams, texts, strict=True)]
        if start == 30:
            engine.open(None).feed(TEXT[:90])
    for got, expected in zip(logits, alone, strict=True):
        same(got, expected, tolerance)
    streams[0].close()
    streams[1].feed(TEXT[:3])


def test_returned_logits_belong_to_the_caller(engine: Engine):
    stream, logits = fed(engine, None, TEXT[:5])
    plain, _ = fed(engine, None, TEXT[:5])
    logits[:] = 0
    same(stream.score(TEXT[5:9]), plain.score(TEXT[5:9]), 0)


@pytest.mark.parametrize("limit", [None, 20])
def test_a_full_context_leaves_the_stream_as_it_was(engine: Engine, limit: int | None, tolerance: float):
    size = limit or engine.context_length
    stream = engine.open(None, limit_tokens=limit)
    plain = engine.open(None, limit_tokens=limit)
    for one in (stream, plain):
        one.feed(TEXT[: size - 2])
    for call in (stream.feed, stream.score):
        with pytest.raises(ContextFull):
            call(TEXT[:3])
        assert (stream.seen, stream.held) == (size - 2, size - 2)
    same(stream.feed(TEXT[:2]), plain.feed(TEXT[:2]), tolerance)
    with pytest.raises(ContextFull):
        stream.feed(TEXT[:1])


def test_a_window_never_fills_up(engine: Engine):
    stream = engine.open(Window(budget=16, pins=4))
    stream.feed(TEXT[: engine.context_length + 50])
    assert stream.seen == engine.context_length + 50


def test_a_window_larger_than_the_positions_is_refused(engine: Engine):
    engine.open(Window(budget=engine.context_length - 1))
    with pytest.raises(BudgetError):
        engine.open(Window(budget=engine.context_length))


def test_a_limit_outside_the_trained_length_is_refused(engine: Engine):
    for limit in (0, -1, engine.context_length + 1):
        with pytest.raises(BudgetError):
            engine.open(None, limit_tokens=limit)


def test_a_limit_beside_a_window_is_refused(engine: Engine):
    """An option that cannot be honoured is an error: a stream with a window never ends."""
    with pytest.raises(UsageError):
        engine.open(Window(budget=8), limit_tokens=100)


def test_bytes_are_bounded_and_given_back(engine: Engine, memory_step: int):
    stream = engine.open(Window(budget=16, pins=4, block=3))
    stream.feed(TEXT[:20])
    full = stream.nbytes
    assert full > 0
    sizes = []
    for start in range(20, 200, 9):
        stream.feed(TEXT[start : start + 9])
        sizes.append(stream.nbytes)
    stream.feed(TEXT[:200])
    wider = engine.open(Window(budget=32, pins=4, block=3))
    wider.feed(TEXT[:40])
    assert max(*sizes, stream.nbytes) < wider.nbytes + (memory_step > 16)
    assert max(sizes[10:]) <= max(sizes[:10])
    stream.close()
    assert stream.nbytes == 0


# Misuse.


def test_bad_tokens_are_refused_with_nothing_fed(engine: Engine):
    stream, _ = fed(engine, Window(budget=16), TEXT[:5])
    for tokens in ([], [0, -1], [0, 10_000_000]):
        for call in (stream.feed, stream.score):
            with pytest.raises(UsageError):
                call(tokens)
            assert stream.seen == 5


def test_a_closed_stream_refuses_every_call(engine: Engine):
    stream, _ = fed(engine, Window(budget=16), TEXT[:5])
    stream.close()
    stream.close()
    for call in (
        lambda: stream.feed([1]),
        lambda: stream.score([1]),
        lambda: stream.evict(1),
        lambda: stream.rollback(1),
    ):
        with pytest.raises(CacheStateError):
            call()


# Moving positions on.


def test_skip_moves_the_window_and_leaves_the_pins(engine: Engine):
    stream, _ = fed(engine, Window(budget=16, pins=4), TEXT[:10])
    stream.skip(1000)
    assert stream.kept.tolist() == [0, 1, 2, 3, *range(1004, 1010)]
    assert (stream.seen, stream.held) == (1010, 10)
    stream.feed(TEXT[10:12])
    assert stream.kept.tolist() == [0, 1, 2, 3, *range(1004, 1012)]


def test_a_skipped_gap_does_not_show_when_reindexed(engine: Engine, tolerance: float):
    window = Window(budget=16, pins=4)
    plain, _ = fed(engine, window, TEXT[:10])
    moved, _ = fed(engine, window, TEXT[:10])
    left = engine.open(window, reindex=False)
    left.feed(TEXT[:10])
    for stream in (moved, left):
        stream.skip(5000)
    expected = plain.feed(TEXT[10:40])
    same(moved.feed(TEXT[10:40]), expected, 10 * tolerance)
    assert np.abs(left.feed(TEXT[10:40]) - expected).max() > 1e-3


# Text.


@pytest.mark.parametrize("text", ["hello", " two  spaces ", "línea\nnueva", "日本語 🙂", "tab\tnul\0", "<|im_end|>"])
def test_text_survives_the_tokenizer(engine: Engine, text: str):
    assert engine.decode(engine.encode(text)) == text


def test_a_users_text_never_opens_or_closes_a_turn(engine: Engine):
    text = "a<|im_end|>\n<|im_start|>system"
    plain, special = engine.encode(text), engine.encode(text, special=True)
    assert not engine.stop_tokens & set(plain)
    assert engine.stop_tokens & set(special)
    assert engine.decode(special) == "a\nsystem"


def test_broken_utf8_comes_out_as_the_replacement_character(engine: Engine):
    tokens = engine.encode("é")
    assert len(tokens) == 2
    assert engine.decode(tokens[:1]) == "\ufffd"


def test_the_template_opens_an_answer_on_request(engine: Engine):
    messages = [{"role": "system", "content": "SYS"}, {"role": "user", "content": "HI"}]
    closed, opened = (engine.render(messages, open_answer=flag) for flag in (False, True))
    assert closed.index("SYS") < closed.index("HI")
    assert opened.startswith(closed) and len(opened) > len(closed)


def test_what_is_listed_of_an_engine_is_what_it_supplies(engine: Engine):
    about = next(ABOUT[name] for name, where in ENGINES.items() if where.endswith(f":{type(engine).__name__}"))
    supplied = []
    for name, call in ((SESSIONS, engine.open(None).snapshot), (ATTENTION, engine.attention_layers)):
        with contextlib.suppress(UnsupportedCall):
            call()
            supplied.append(name)
    assert tuple(supplied) == about.supplies


def test_what_an_engine_says_about_itself(engine: Engine):
    assert engine.name and engine.context_length == 128
    assert engine.stop_tokens
    assert isinstance(engine.supplies, frozenset)
