"""The advice on the fake engine: figures against plain replays, what is read, refusals, interruption, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headwater.bench import advise as door
from headwater.bench import advise_report
from headwater.bench.advise import experiment, kv_bytes_per_token, reading, run
from headwater.bench.advise_results import AdviseResults, Asked, Row, read
from headwater.bench.engine_trace import EngineTrace
from headwater.bench.measure import script
from headwater.bench.results import write_json
from headwater.engines.base import AttentionBlock, Engine
from headwater.engines.fake import FakeEngine
from headwater.errors import BudgetError, ContextFull, HeadwaterError, MissingExtra, UnsupportedCall, UsageError
from headwater.policies import POLICIES, policy
from headwater.traces import ArrayTrace, replay
from tests.bench.advice import advised
from tests.bench.talk import conversation


class Counting(FakeEngine):
    """Counts how often its attention was run over the tokens."""

    readings = 0

    def attention(self, tokens: Sequence[int], **options: Any) -> Iterator[AttentionBlock]:
        blocks = super().attention(tokens, **options)

        def counted() -> Iterator[AttentionBlock]:
            self.readings += 1
            yield from blocks

        return counted()


@pytest.fixture(scope="module")
def bent() -> tuple[AdviseResults, Counting]:
    engine = Counting()
    return advised(12, engine), engine


@pytest.fixture(scope="module")
def attention() -> ArrayTrace:
    """The same attention, all at once."""
    engine = FakeEngine()
    ids = reading(engine, script(engine, conversation(12))).ids
    (block,) = engine.attention(ids, block=len(ids))
    trace = EngineTrace(engine, ids, name="")
    return ArrayTrace(block.weights.reshape(-1, len(ids), len(ids)), heads=trace.heads)


# The attention of an engine as a trace


@pytest.mark.parametrize("chunk_bytes", [1, 100_000, 1 << 30])
def test_an_engine_s_attention_is_the_same_trace_however_it_is_cut(attention: ArrayTrace, chunk_bytes: int) -> None:
    engine = Counting()
    ids = reading(engine, script(engine, conversation(12))).ids[:150]
    trace = EngineTrace(engine, ids, name="talk")
    assert (trace.name, trace.tokens, trace.rows, engine.readings) == ("talk", 150, 12, 0)
    assert [(head.layer, head.head) for head in trace.heads] == [
        (layer, head) for layer in range(4) for head in range(3)
    ]
    whole, steps = attention.whole(), list[int]()
    for chunk in trace.chunks(chunk_bytes):
        assert len(chunk.steps) == 1 or 4 * trace.rows * trace.tokens * len(chunk.steps) <= chunk_bytes
        assert len(chunk.steps) <= 128
        for step in chunk.steps:
            paid = chunk.weights[:, step - chunk.first, : step + 1]
            assert np.array_equal(paid, whole[:, step - 1, : step + 1])
        steps += chunk.steps
    assert steps == list(range(1, 150)) and engine.readings == 1
    assert len(list(trace.chunks())) > 0 and engine.readings == 2


def test_a_single_token_has_no_step() -> None:
    assert list(EngineTrace(FakeEngine(), [5], name="").chunks()) == []


def test_what_the_engine_refuses_is_refused_before_anything_runs() -> None:
    with pytest.raises(ContextFull, match="longer than fake was trained for"):
        EngineTrace(FakeEngine(context_length=10), range(11), name="")


# What is read, and what it takes


def test_the_conversation_is_read_as_chat_would_feed_it() -> None:
    engine, said = FakeEngine(), conversation(3)
    messages = [{"role": "system", "content": "Be kind."}]
    for exchange in said.exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    whole = engine.encode(engine.render(messages, open_answer=False), special=True)
    text = reading(engine, script(engine, said))
    assert list(text.ids) == whole
    assert (text.tokens, text.turns) == (len(whole), 6)
    assert engine.decode(text.ids[: text.head_tokens]) == "system\nBe kind.\n"


def test_of_a_longer_conversation_the_first_tokens_are_read_and_that_is_told() -> None:
    engine = FakeEngine(context_length=300)
    told = list[str]()
    found = experiment(engine, conversation(12), Asked(), tell=told.append)
    subject, whole = found.subject, advised(12).subject
    assert (subject.used_tokens, subject.conversation.tokens) == (300, whole.used_tokens)
    assert 0 < subject.used_turns < subject.conversation.turns == 24
    choice = (
        f"the conversation has {whole.used_tokens} tokens and fake was trained for 300: its first 300 are read, "
        f"{subject.used_turns} of 24 turns"
    )
    assert choice in subject.choices and choice in told[0]
    assert choice in advise_report.page(found)
    turns = reading(engine, script(engine, conversation(12).first(subject.used_turns))).tokens
    assert turns <= 300 < reading(engine, script(engine, conversation(12).first(subject.used_turns + 2))).tokens


def test_the_bytes_of_a_token_are_those_of_a_real_stream() -> None:
    assert kv_bytes_per_token(FakeEngine(), range(100)) == 8
    assert kv_bytes_per_token(FakeEngine(), [1]) == 8


# The figures


def chosen(results: AdviseResults, **wanted: Any) -> list[Row]:
    return [row for row in results.rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_every_row_is_what_a_plain_replay_gives(bent: tuple[AdviseResults, Counting], attention: ArrayTrace) -> None:
    results, _ = bent
    assert results.subject.budgets == (64, 128, 256)
    assert {row.policy for row in results.rows} == POLICIES.keys()
    for row in results.rows:
        alone = replay(attention, policy(row.policy, budget=row.budget, **row.parameters))
        assert row.retained_attention_mass == alone.retained_attention_mass, row
        assert row.heavy_hitter_recall == alone.heavy_hitter_recall
        assert row.eviction_calls == alone.eviction_calls
        assert (row.mass_low, row.mass_high) == tuple(np.quantile(alone.mass_by_row, (0.1, 0.9)))
    # streaming-llm pins the system prompt, as chat does
    assert {row.parameters["sinks"] for row in chosen(results, policy="streaming-llm")} == {results.subject.head_tokens}


def test_the_windows_are_tried_at_the_bend_in_a_second_reading(bent: tuple[AdviseResults, Counting]) -> None:
    results, engine = bent
    assert results.advice.by == "bend" and engine.readings == 2
    tried = chosen(results, role="window")
    assert {row.budget for row in tried} == {results.advice.budget}
    assert {row.policy for row in tried} == {"h2o", "scissorhands", "snapkv", "pyramidkv"}
    windows = {row.recent_window for row in tried if row.policy == "h2o"}
    assert windows == {window for window in (8, 128, 512) if window < (results.advice.budget or 0)}


def test_at_a_given_budget_one_reading_is_enough(attention: ArrayTrace) -> None:
    engine = Counting()
    results = advised(12, engine, budget=100, sinks=6, seed=5)
    assert engine.readings == 1
    assert (results.advice.by, results.advice.best.budget, results.advice.live.budget) == ("budget", 100, 100)
    assert results.subject.budgets == (64, 100, 128, 256)
    assert {row.budget for row in chosen(results, role="window")} == {100}
    assert {row.parameters["sinks"] for row in chosen(results, policy="h2o")} == {6}
    assert {row.parameters["seed"] for row in chosen(results, policy="random")} == {5}
    h2o = chosen(results, policy="h2o", role="window", recent_window=8)[0]
    assert h2o.retained_attention_mass == (
        replay(attention, "h2o", budget=100, sinks=6, recent_window=8).retained_attention_mass
    )


def test_in_a_memory_every_policy_has_the_budget_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "kv_bytes_per_token", lambda *_: 4000)
    engine = Counting()
    results = advised(12, engine, memory_bytes=600_000)
    assert engine.readings == 1 and results.advice.by == "memory" and not results.subject.whole_fits
    fitting = chosen(results, role="fit")
    assert {row.policy for row in fitting} == POLICIES.keys() - {"full"}
    for row in fitting:
        assert 600_000 - 6000 < row.total_bytes <= 600_000
    assert {(row.policy, row.budget) for row in chosen(results, role="window")} <= {
        (row.policy, row.budget) for row in fitting
    }
    able = [row for row in results.rows if row.role in ("fit", "window") and row.policy != "random"]
    best = max(row.retained_attention_mass for row in able)
    assert results.advice.best in able and results.advice.best.retained_attention_mass == best


def test_a_memory_that_holds_all_of_it_says_so_and_advises_at_the_bend(bent: tuple[AdviseResults, Counting]) -> None:
    results = advised(12, memory_bytes=bent[0].full.total_bytes)
    assert results.subject.whole_fits
    assert (results.advice.by, results.advice.best) == ("bend", bent[0].advice.best)
    assert advised(12, memory_bytes=bent[0].full.total_bytes - 1).advice.by == "memory"


def test_a_policy_that_does_not_fit_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "kv_bytes_per_token", lambda *_: 100)
    results = advised(12, memory_bytes=50_000)
    assert not chosen(results, role="fit", policy="snapkv")
    assert any(choice.startswith("snapkv is left out of the memory's budgets") for choice in results.subject.choices)


def test_everything_kept_is_the_ceiling_and_the_random_choice_the_floor(bent: tuple[AdviseResults, Counting]) -> None:
    results, _ = bent
    assert (results.full.retained_attention_mass, results.full.heavy_hitter_recall) == (1.0, 1.0)
    assert results.full.budget == results.subject.used_tokens
    assert results.full.total_bytes == 8 * results.subject.used_tokens
    assert (results.advice.floor.policy, results.advice.floor.budget) == ("random", results.advice.budget)


# The command's call


def test_run_writes_figures_and_page_and_prints_the_same_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "mine.jsonl"
    roles = ("user", "assistant") * 8
    lines = [{"role": role, "content": f"{role} says number {index}."} for index, role in enumerate(roles)]
    said.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    output = tmp_path / "out"
    assert run(model="fake", engine="fake", conversation=said, budget=70, turns=14, output=output) == 0
    out, err = capsys.readouterr()
    stored = read(output / "advice.json")
    assert (output / "index.html").read_text(encoding="utf-8") == advise_report.page(stored)
    assert stored.subject.asked == Asked(budget=70, turns=14)
    assert stored.subject.conversation.turns == 14 and "Choice:       the first 14 of 16 turns" in err
    for key in ("hardware", "choices"):
        assert getattr(stored.subject, key)
    assert stored.versions["headwater"] and stored.duration_s > 0
    for text in advise_report.paragraphs(stored):
        assert text in " ".join(out.split())
    assert f"Figures: {output / 'advice.json'}" in out and "replay: " in err
    assert {path.name for path in output.iterdir()} == {"advice.json", "index.html"}


def test_what_is_stored_comes_back(bent: tuple[AdviseResults, Counting], tmp_path: Path) -> None:
    write_json(tmp_path / "advice.json", bent[0])
    assert read(tmp_path / "advice.json") == bent[0]


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "1GB", "budget": 100}, UsageError, "--memory and --budget cannot both be given"),
    ({"memory": "512"}, UsageError, "'512' is not a size of memory"),
    ({"budget": 10_000}, BudgetError, "a budget of 10,000 holds the whole conversation"),
    ({"turns": 1}, UsageError, "turns must be at least 2"),
    ({"sinks": 400, "turns": 4}, UsageError, "budgets are compared from 433 on"),
    ({"output": Path("/proc/none")}, HeadwaterError, "/proc/none: cannot be written"),
    ({"conversation": Path("gone.txt")}, UsageError, "gone.txt: cannot be read"),
]


@pytest.mark.parametrize(("asked", "kind", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_advised_on_is_refused(
    asked: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "replay_all", None)  # nothing runs
    with pytest.raises(kind, match=said):
        run(**{"model": "fake", "engine": "fake", "turns": 30, "output": tmp_path, **asked})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "extra"), [("numba", "lab"), ("matplotlib", "report")])
def test_what_it_needs_is_missed_before_the_model_is_loaded(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    absent = SimpleNamespace(find_spec=lambda name: None if name == module else find(name))
    monkeypatch.setattr(door, "find_spec", absent.find_spec)
    monkeypatch.setattr(sys.modules["headwater.bench.style"], "find_spec", absent.find_spec)
    monkeypatch.setattr(door, "open_engine", None)
    with pytest.raises(MissingExtra, match=rf"{module} is not installed; run: pip install 'headwater\[{extra}\]'"):
        run(model="fake", engine="fake", output=tmp_path)


def test_an_engine_that_shows_no_attention_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("attention", "attention_heads", "attention_layers"):
        monkeypatch.setattr(FakeEngine, name, getattr(Engine, name))
    with pytest.raises(UnsupportedCall, match="fake runs on an engine that does not show its attention"):
        run(model="fake", engine="fake", output=tmp_path)


def test_ctrl_c_leaves_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = list[str]()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(door, "replay_all", interrupt)
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self.name))
    assert run(model="fake", engine="fake", turns=30, output=tmp_path) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "Interrupted; nothing was measured"
    assert list(tmp_path.iterdir()) == [] and closed == ["fake"]


@pytest.mark.real_model
def test_on_a_real_model(tmp_path: Path) -> None:
    """A few turns of the bundled conversation: real bytes, real attention, and an advice that holds together."""
    assert run(model="smollm2", turns=12, budget=96, output=tmp_path) == 0
    found = read(tmp_path / "advice.json")
    assert (found.subject.layers, found.subject.heads, found.subject.kv_bytes_per_token) == (30, 270, 46_080)
    assert found.full.retained_attention_mass == pytest.approx(1, abs=1e-5)
    best, live, floor = found.advice.best, found.advice.live, found.advice.floor
    assert 1 > best.retained_attention_mass > live.retained_attention_mass > floor.retained_attention_mass > 0.4
    assert live.policy == "streaming-llm" and best.cache_bytes == 97 * 46_080
