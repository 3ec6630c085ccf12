"""The experiment on one long text, whole on the fake engine; its arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.bench import stream as door
from headwater.bench import stream_report
from headwater.bench.stream import experiment, plan, run
from headwater.bench.stream_results import Gap, StreamResults, Text, buckets, interval, read, with_ratios
from headwater.engines.fake import FakeEngine
from headwater.errors import BudgetError, HeadwaterError, InputFileError, UnsupportedCall, UsageError
from headwater.policies import Window
from tests.bench.test_report import Tags

WORDS = "It was a dark and stormy night; the rain fell in torrents. "
TEXT = Text(name="book.txt", sha256="0" * 64, tokens=6000)
SMALL = {"budgets": (32, 64), "sinks": (0, 4), "gaps": (0, 1000, 65536)}


@pytest.fixture(scope="module")
def model() -> FakeEngine:
    return FakeEngine(context_length=1500)


@pytest.fixture(scope="module")
def ids(model: FakeEngine) -> list[int]:
    return model.encode(WORDS * 110)


@pytest.fixture(scope="module")
def measured(model: FakeEngine, ids: list[int]) -> StreamResults:
    return experiment(model, ids, TEXT, plan(tokens=5000, seed=0, **SMALL))


def nll(model: FakeEngine, ids: list[int], window: Window | None) -> np.ndarray:
    stream = model.open(window)
    stream.feed(ids[:1])
    return np.array([-stream.score([token])[0] for token in ids[1:]])


def test_the_ablation_is_what_scoring_token_by_token_gives(
    measured: StreamResults, model: FakeEngine, ids: list[int]
) -> None:
    assert [(cell.budget, cell.sinks) for cell in measured.ablation] == [(32, 0), (32, 4), (64, 0), (64, 4)]
    for cell in measured.ablation:
        found = nll(model, ids[:2048], Window(budget=cell.budget, pins=cell.sinks))
        # the token at position `budget` is the first that was fed with the budget full, the next one sees the eviction
        assert cell.tokens == 2047 - cell.budget
        assert cell.perplexity_after == pytest.approx(np.exp(found[cell.budget :].mean()))
        assert cell.perplexity_same_tokens == pytest.approx(np.exp(found[64:].mean()))


def test_the_first_token_counted_after_is_the_first_scored_with_something_gone(model: FakeEngine) -> None:
    stream = model.open(Window(budget=32))
    stream.feed([65])
    held = list[int]()
    for _ in range(40):
        held.append(stream.seen - stream.held)
        stream.score([65])
    assert held.index(1) == 32


def test_the_gap_is_fed_moved_on_and_scored(measured: StreamResults, model: FakeEngine, ids: list[int]) -> None:
    assert [(gap.reindexed, gap.gap) for gap in measured.gaps] == [
        (reindexed, gap) for reindexed in (True, False) for gap in (0, 1000, 65536)
    ]
    for gap in measured.gaps:
        stream = model.open(Window.of(64, 4), reindex=gap.reindexed)
        stream.feed(ids[:128])
        stream.skip(gap.gap)
        assert gap.perplexity == pytest.approx(np.exp(-stream.score(ids[128 : 128 + 512]).mean()))
        assert gap.tokens == 512
        assert gap.interval[0] < gap.perplexity < gap.interval[1]


def test_re_indexing_makes_the_gap_vanish_on_the_fake_engine(measured: StreamResults) -> None:
    assert measured.gap_reindexed_over_zero == 1.0
    assert measured.gap_left_over_zero is not None and measured.gap_left_over_zero != 1.0


def test_full_stops_at_the_trained_length_and_the_long_run_goes_on(measured: StreamResults) -> None:
    assert [row.name for row in measured.along] == ["full", "sliding-window", "streaming-llm"]
    assert [row.budget for row in measured.along] == [None, 64, 64]
    assert all(row.stopped_because == "the trained length of 1,500 tokens" for row in measured.along)
    assert [(bucket.start, bucket.stop) for bucket in measured.along[0].buckets] == [(0, 1000), (1000, 1500)]
    assert measured.long_run is not None
    assert [bucket.stop for bucket in measured.long_run.buckets] == [1000, 2000, 3000, 4000, 5000]
    assert measured.long_run.block == Window.of(64, 4).block
    assert measured.complete


def test_without_a_long_run_the_windows_go_to_the_end_and_that_is_told(model: FakeEngine, ids: list[int]) -> None:
    found = experiment(model, ids, TEXT, plan(tokens=4000, seed=0, **SMALL))
    assert found.long_run is None
    assert any("no long run: it needs more than 3 trained lengths, 4,500 tokens" in choice for choice in found.choices)
    full, window, _ = found.along
    assert full.buckets[-1].stop == 1500
    assert window.buckets[-1].stop == 4000 and window.stopped_because == "the end of the text asked for"


def test_buckets_are_by_position_and_a_short_rest_is_left_out() -> None:
    found = buckets(np.log(np.concatenate([np.full(999, 2.0), np.full(1000, 3.0), np.full(99, 9.0)])))
    assert [(bucket.start, bucket.stop) for bucket in found] == [(0, 1000), (1000, 2000)]
    assert [bucket.perplexity for bucket in found] == pytest.approx([2.0, 3.0])
    assert buckets(np.zeros(1099))[-1].stop == 1100


def test_the_interval_is_repeatable_and_narrow_for_equal_tokens() -> None:
    assert interval(np.full(512, np.log(5.0)), seed=0) == pytest.approx((5.0, 5.0))
    noise = np.random.default_rng(1).normal(2.0, 1.0, 512)
    assert interval(noise, seed=3) == interval(noise, seed=3)


def test_the_ratios_are_the_worst_gap_and_the_far_one(measured: StreamResults) -> None:
    def gap(distance: int, reindexed: bool, value: float) -> Gap:
        return Gap(gap=distance, reindexed=reindexed, perplexity=value, interval=(value, value), tokens=1)

    gaps = (
        gap(0, True, 10.0),
        gap(8, True, 12.0),
        gap(65536, True, 11.0),
        gap(0, False, 10.0),
        gap(65536, False, 300.0),
    )
    found = with_ratios(replace(measured, gaps=gaps))
    assert (found.gap_reindexed_over_zero, found.gap_left_over_zero) == (1.2, 30.0)
    near = with_ratios(replace(measured, gaps=gaps[:2]))
    assert near.gap_left_over_zero is None


REFUSED = [
    ({"budgets": ()}, UsageError, "budgets: give at least one"),
    ({"sinks": (4, 4)}, UsageError, "sinks: a number is given twice in 4, 4"),
    ({"gaps": (-1,)}, UsageError, "gaps must be at least 0, got -1"),
    ({"budgets": (4,)}, BudgetError, "pins + 1 = 5"),
    ({"sinks": (-1,)}, BudgetError, "pins must be at least 0"),
    ({"tokens": 639}, UsageError, "tokens must be at least 640"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_numbers_that_do_not_fit_are_refused(changes: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        plan(**{"tokens": 5000, "seed": 0, **SMALL, **changes})  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value)


def test_no_gap_is_always_measured_as_the_reference() -> None:
    assert plan(tokens=5000, budgets=(512, 64), sinks=(1, 0), gaps=(9,), seed=0).gaps == (0, 9)
    chosen = plan(tokens=5000, budgets=(512, 64), sinks=(1, 0), gaps=(9,), seed=0)
    assert (chosen.shown_budget, chosen.shown_sinks, chosen.budgets) == (512, 1, (64, 512))
    assert plan(tokens=5000, budgets=(256, 512), sinks=(0, 4, 8), gaps=(0,), seed=0).shown_budget == 256


def test_run_writes_json_and_page_and_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text(WORDS * 30, encoding="utf-8")
    output = tmp_path / "out" / "stream.json"
    assert run(model="fake", engine="fake", text=text, output=output, tokens=1500, seed=2, **SMALL) == 0
    value = json.loads(output.read_text(encoding="utf-8"))
    for key in ("schema", "hardware", "versions", "seed", "gap_reindexed_over_zero", "gap_left_over_zero"):
        assert value[key] is not None
    assert {"gaps", "ablation", "along", "long_run", "settings", "text"} <= value.keys()
    assert value["complete"] is True and value["seed"] == 2
    page = (tmp_path / "out" / "stream.html").read_text(encoding="utf-8")
    assert page == stream_report.page(read(output))
    out = capsys.readouterr()
    assert "Sinks and budgets" in out.out and "gap: " in out.err


def test_the_page_stands_alone(measured: StreamResults) -> None:
    page = stream_report.page(measured)
    tags = Tags(page)
    assert not tags.open and len(tags.ids) == len(set(tags.ids))
    assert "<script" not in page and "http:" not in page and "https:" not in page
    assert sum(tag == "svg" for tag, _ in tags.tags) == 4
    assert "Over 5,000 tokens, 3.3 trained lengths" in page
    escaped = stream_report.page(replace(measured, model="<script>", choices=("<script>",)))
    assert "<script>" not in escaped


def test_a_text_that_is_too_short_or_no_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text(WORDS, encoding="utf-8")
    with pytest.raises(InputFileError, match=r"book\.txt: 59 tokens of text, 1500 were asked for"):
        run(model="fake", engine="fake", text=text, output=tmp_path / "s.json", tokens=1500, **SMALL)
    text.write_bytes(b"one\n\xff")
    with pytest.raises(InputFileError, match=r"book\.txt, line 2: not UTF-8"):
        run(model="fake", engine="fake", text=text, output=tmp_path / "s.json", tokens=1500, **SMALL)
    with pytest.raises(InputFileError, match="cannot be read"):
        run(model="fake", engine="fake", text=tmp_path / "gone.txt", output=tmp_path / "s.json", tokens=1500, **SMALL)
    assert not (tmp_path / "s.json").exists()


def test_ctrl_c_keeps_the_parts_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text(WORDS * 30, encoding="utf-8")

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(door._Bench, "along", interrupt)
    output = tmp_path / "stream.json"
    assert run(model="fake", engine="fake", text=text, output=output, tokens=1500, **SMALL) == 130
    found = read(output)
    assert found.ablation and found.gaps and not found.along and not found.complete
    assert f"what was measured is in {output}" in capsys.readouterr().err
    assert stream_report.page(found)


def test_an_engine_that_cannot_skip_says_so(monkeypatch: pytest.MonkeyPatch, model: FakeEngine, ids: list[int]) -> None:
    from headwater.engines.base import Stream
    from headwater.engines.fake import FakeStream

    monkeypatch.setattr(FakeStream, "skip", Stream.skip)
    with pytest.raises(UnsupportedCall, match="cannot skip 1000 positions"):
        experiment(model, ids, TEXT, plan(tokens=1500, seed=0, **SMALL))


def test_no_finite_probability_is_an_error(monkeypatch: pytest.MonkeyPatch, model: FakeEngine, ids: list[int]) -> None:
    from headwater.engines.fake import FakeStream

    monkeypatch.setattr(FakeStream, "score", lambda self, tokens: np.full(len(tokens), np.nan))
    with pytest.raises(HeadwaterError, match="no finite probability"):
        experiment(model, ids, TEXT, plan(tokens=1500, seed=0, **SMALL))
