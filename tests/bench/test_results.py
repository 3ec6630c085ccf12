"""The figures of a row by hand, and the JSON that comes back the same or is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headwater.bench.results import Row, Turn, first_eviction, perplexity, read, summarise, write_json, write_text
from headwater.errors import HeadwaterError, InputFileError
from tests.bench.talk import conversation, engine, settings


def turn(number: int, nll: float, *, tokens: int = 2, seen: int = 0, evicted: int = 0) -> Turn:
    return Turn(
        turn=number, nll=nll, tokens=tokens, seen=seen, held=seen - evicted, cache_bytes=10 * number, evicted=evicted
    )


FULL = Row(name="full", rule="", turns=(turn(2, 2.0, seen=10), turn(4, 4.0, seen=20), turn(6, 2.0, seen=30)))
WINDOW = Row(
    name="sliding-window",
    rule="",
    turns=(turn(2, 2.0, seen=10), turn(4, 6.0, seen=20, evicted=4), turn(6, 6.0, tokens=4, seen=30, evicted=14)),
)


def test_perplexity_pools_by_tokens() -> None:
    assert perplexity(WINDOW.turns[1:]) == pytest.approx(math.exp(12 / 6))
    assert perplexity(()) is None


def test_perplexity_that_is_no_number_is_nothing() -> None:
    assert perplexity([turn(2, math.inf)]) is None
    assert perplexity([turn(2, 1e6)]) is None


def test_before_and_after_split_at_the_first_turn_scored_with_something_evicted() -> None:
    _, window = summarise((FULL, WINDOW), limit_tokens=100, seed=0)
    assert first_eviction(WINDOW) == window.first_eviction_turn == 4
    assert window.perplexity_before == pytest.approx(math.exp(2 / 2))
    assert window.perplexity_after == pytest.approx(math.exp(12 / 6))
    assert window.cache_bytes == (20, 40, 60)


def test_full_is_split_where_the_others_evict_and_is_its_own_reference() -> None:
    full, window = summarise((FULL, WINDOW), limit_tokens=100, seed=0)
    assert full.perplexity_before == pytest.approx(math.exp(2 / 2))
    assert full.perplexity_after == pytest.approx(math.exp(6 / 4))
    assert full.perplexity_over_full == 1.0
    assert full.first_eviction_turn is None
    assert window.perplexity_over_full == pytest.approx(math.exp(12 / 6) / math.exp(6 / 4))


def test_relative_to_full_covers_the_turns_that_both_have() -> None:
    short = Row(name="full", rule="", turns=FULL.turns[:2])
    _, window = summarise((short, WINDOW), limit_tokens=100, seed=0)
    assert window.perplexity_over_full == pytest.approx(math.exp(6 / 2) / math.exp(4 / 2))


def test_where_there_is_nothing_to_measure_the_figures_are_null() -> None:
    (alone,) = summarise((WINDOW,), limit_tokens=100, seed=0)
    assert (alone.perplexity_over_full, alone.perplexity_over_full_interval) == (None, None)
    (full,) = summarise((FULL,), limit_tokens=100, seed=0)
    assert (full.perplexity_after, full.perplexity_over_full) == (None, None)
    (empty,) = summarise((Row(name="sliding-window", rule=""),), limit_tokens=1, seed=0)
    assert (empty.perplexity_before, empty.turns_completed) == (None, 0)


TURNS_COMPLETED = [
    # limit, turns: an answer counts when its text fits, a question when the answer could have begun
    (30, 6),
    (29, 5),  # the third answer passed; its question had ended at 28
    (28, 5),
    (27, 4),
    (9, 1),
    (8, 1),
    (7, 0),
]


@pytest.mark.parametrize(("limit", "completed"), TURNS_COMPLETED)
def test_turns_that_a_real_session_would_have_completed(limit: int, completed: int) -> None:
    full, window = summarise((FULL, WINDOW), limit_tokens=limit, seed=0)
    assert full.turns_completed == completed
    assert window.turns_completed == 6


def test_the_interval_is_paired_repeatable_and_around_the_ratio() -> None:
    full = Row(name="full", rule="", turns=tuple(turn(2 * i, 2.0 + i % 3) for i in range(1, 40)))
    same = Row(name="a", rule="", turns=tuple(turn(2 * i, 2.2 + i % 3, evicted=1) for i in range(1, 40)))
    _, first = summarise((full, same), limit_tokens=10, seed=1)
    assert first == summarise((full, same), limit_tokens=10, seed=1)[1]
    assert first.perplexity_over_full_interval == pytest.approx((math.exp(0.1), math.exp(0.1)))
    varied = Row(name="a", rule="", turns=tuple(turn(2 * i, 2.0 + i % 5, evicted=1) for i in range(1, 40)))
    _, row = summarise((full, varied), limit_tokens=10, seed=1)
    assert row.perplexity_over_full_interval is not None and row.perplexity_over_full is not None
    low, high = row.perplexity_over_full_interval
    assert low < row.perplexity_over_full < high


def test_results_come_back_from_their_json_as_they_were(tmp_path: Path) -> None:
    from headwater.bench.compare import compare

    measured = compare(engine(), conversation(), settings())
    write_json(tmp_path / "results.json", measured)
    assert read(tmp_path / "results.json") == measured


FOREIGN = [
    ("{}", "its schema is None"),
    ('{"schema": "other/1"}', "its schema is 'other/1'"),
    ("[1]", "its schema is None"),
    ("nonsense", "not a results file"),
    ('{"schema": "headwater/compare/1"}', "Settings"),
]


@pytest.mark.parametrize(("text", "said"), FOREIGN)
def test_a_foreign_or_damaged_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputFileError) as caught:
        read(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_row_with_a_missing_or_unknown_key_is_refused(tmp_path: Path) -> None:
    from headwater.bench.compare import compare

    path = tmp_path / "results.json"
    write_json(path, compare(engine(), conversation(), settings(policies=("full",))))
    value = json.loads(path.read_text(encoding="utf-8"))
    for change, said in (({"name": None}, "name"), ({"speling": 1}, "unknown key 'speling' in Row")):
        row = {**value["rows"][0], **change}
        row = {key: item for key, item in row.items() if item is not None or key not in change}
        path.write_text(json.dumps({**value, "rows": [row]}), encoding="utf-8")
        with pytest.raises(InputFileError, match=said):
            read(path)


def test_a_row_that_is_damaged_inside_is_refused(tmp_path: Path) -> None:
    from headwater.bench.compare import compare

    path = tmp_path / "results.json"
    write_json(path, compare(engine(), conversation(), settings(policies=("full",))))
    value = json.loads(path.read_text(encoding="utf-8"))
    for row in (3, {"name": "full"}, {**value["rows"][0], "kept": [{"turn": 1}]}):
        path.write_text(json.dumps({**value, "rows": [row]}), encoding="utf-8")
        with pytest.raises(InputFileError, match=r"not complete|expected an object"):
            read(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_text(path, "before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwater.bench.results.os.replace", fail)
    with pytest.raises(HeadwaterError, match="No space left on device"):
        write_text(path, "after")
    assert path.read_text(encoding="utf-8") == "before"
    assert [child.name for child in tmp_path.iterdir()] == ["results.json"]
