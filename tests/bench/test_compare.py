"""The comparison on the fake engine: rows against the same done by hand, refusals, interruption, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.bench import compare as door
from headwater.bench.compare import compare, run
from headwater.bench.measure import Driven, ranges, script, spread
from headwater.bench.results import END, Results, Row
from headwater.bench.rows import DEFAULT_ROWS, plan
from headwater.chat.template import Template
from headwater.engines.fake import FakeEngine, FakeStream
from headwater.engines.snapshot import Held
from headwater.errors import BudgetError, HeadwaterError, MissingExtra, UnknownName, UnsupportedCall, UsageError
from headwater.policies import Window
from tests.bench.talk import conversation, engine, settings, ticking


def row(measured: Results, name: str) -> Row:
    return next(row for row in measured.rows if row.name == name)


def by_hand(window: Window | None) -> list[tuple[float, int, int]]:
    """Negative log-probability, seen and held after every answer, one token at a time."""
    model, told = engine(), conversation()
    template = Template.derive(model, told.system)
    stream = model.open(window)
    stream.feed(template.head)
    found = list[tuple[float, int, int]]()
    for index, said in enumerate(told.exchanges):
        stream.feed(template.question(model, said.question, first=index == 0))
        nll = -sum(float(stream.score([token])[0]) for token in model.encode(said.answer))
        found.append((nll, stream.seen, stream.held))
        stream.feed(template.answer_close)
    return found


@pytest.fixture(scope="module")
def measured() -> Results:
    return compare(engine(), conversation(), settings(), clock=ticking())


HEAD = len(Template.derive(engine(), "Be kind.").head)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("full", None),
        ("sliding-window", Window(budget=128)),
        ("streaming-llm", Window(budget=128, pins=HEAD)),  # the system prompt is longer than four sinks
    ],
)
def test_a_row_is_what_teacher_forcing_by_hand_gives(measured: Results, name: str, window: Window | None) -> None:
    for turn, (nll, seen, held) in zip(row(measured, name).turns, by_hand(window), strict=True):
        assert turn.nll == pytest.approx(nll)
        assert (turn.seen, turn.held, turn.evicted) == (seen, held, seen - held)
        assert turn.cache_bytes == 8 * held


def test_rows_have_the_names_turns_and_reasons_asked_for(measured: Results) -> None:
    assert tuple(row.name for row in measured.rows) == DEFAULT_ROWS
    for found in measured.rows:
        assert [turn.turn for turn in found.turns] == list(range(2, 25, 2))
        assert found.complete
    assert row(measured, "sliding-window").stopped_because == END
    assert row(measured, "sliding-window").turns_completed == 24


@pytest.mark.parametrize(("in_answer", "died"), [(True, 12), (False, 11)], ids=["answer", "question"])
def test_full_goes_on_past_its_limit_and_says_where_a_session_would_have_died(
    measured: Results, in_answer: bool, died: int
) -> None:
    """The limit lies one token short of the sixth answer's end, or of its question's."""
    sixth = row(measured, "full").turns[5]
    limit = sixth.seen - 1 if in_answer else sixth.seen - sixth.tokens - 1
    full = row(compare(engine(), conversation(), settings(policies=("full",), limit=limit)), "full")
    assert full.turns[-1].turn == 24
    assert full.stopped_because == (
        f"a real session would have died in turn {died}, past the limit of {limit} tokens; measured on as the "
        f"reference, to {END}"
    )
    assert full.turns_completed == died - 1


def test_full_that_stays_in_its_limit_simply_ends() -> None:
    found = row(compare(engine(), conversation(), settings(policies=("full",), limit=5000)), "full")
    assert (found.stopped_because, found.turns_completed) == (END, 24)


def test_full_stops_at_the_trained_length_and_the_others_go_on() -> None:
    found = compare(engine(context_length=300), conversation(), settings(limit=200))
    full, window = row(found, "full"), row(found, "sliding-window")
    last = full.turns[-1].turn
    assert last < 24 and full.turns[-1].seen <= 300
    assert full.stopped_because.endswith(f"the trained length of 300 tokens ends after turn {last}")
    assert full.complete
    assert window.turns_completed == 24
    assert window.perplexity_over_full is not None


def test_a_limit_above_the_trained_length_is_the_trained_length_and_told() -> None:
    found = compare(engine(context_length=300), conversation(), settings(limit=4096, policies=("full",)))
    assert "a session without eviction ends at the trained length, 300 tokens" in found.choices
    assert row(found, "full").turns_completed == row(found, "full").turns[-1].turn


def test_what_an_engine_chose_for_the_user_is_told() -> None:
    chosen = engine()
    chosen.choices = ("it runs on 3 threads",)
    assert "it runs on 3 threads" in compare(chosen, conversation(), settings(policies=("full",))).choices


@pytest.mark.parametrize("longest", [1, 25], ids=["answers that fit", "answers that outgrow the room"])
def test_whole_turns_leave_as_in_chat(longest: int) -> None:
    """Held against the ledger of a conversation as `chat` keeps it: everything fed token by token while answering."""
    from headwater.chat.conversation import Conversation as Chat
    from headwater.policies import policy

    told = conversation(20)
    said = tuple(replace(one, answer="word " * (1 + 7 * i % longest)) for i, one in enumerate(told.exchanges))
    told = replace(told, exchanges=said)
    model, measured = engine(), compare(engine(), told, settings(budget=256))
    chat = Chat.begin(model, policy("streaming-llm", budget=256, sinks=4), told.system)
    turns = iter(row(measured, "streaming-llm-turns").turns)
    during = 0
    for index, one in enumerate(told.exchanges):
        before, start = chat.gone, len(chat.ledger)
        chat.feed(chat.template.question(model, one.question, first=index == 0))
        chat.add_turn("user", one.question, start=start, before=before)
        before, start = chat.gone, len(chat.ledger)
        for token in model.encode(one.answer):
            chat.feed([token])
        during += chat.gone.turns - before.turns
        turn = next(turns)
        assert (turn.seen, turn.held) == (chat.stream.seen, chat.stream.held)
        chat.feed(chat.template.answer_close)
        chat.add_turn("assistant", one.answer, start=start, before=before)
    assert chat.gone.turns > 4
    assert (during > 0) is (longest > 1)


def test_whole_turns_score_the_same_in_one_piece_and_token_by_token() -> None:
    model, window = engine(), Window.of(96, 8)
    text = script(model, conversation())
    scores = list[list[float]]()
    for size in (1, 1000):
        driven = Driven(stream=model.open(window), whole_turns=True, head_tokens=len(text.head))
        driven.feed(text.head)
        found = list[float]()
        for exchange in text.exchanges:
            driven.feed(exchange.question)
            driven.end_turn("user")
            for start in range(0, len(exchange.answer), size):
                found += driven.score(exchange.answer[start : start + size])
            driven.feed(exchange.close)
            driven.end_turn("assistant")
        scores.append(found)
    assert scores[0] == scores[1]


def test_an_answer_longer_than_the_window_is_scored_to_its_end() -> None:
    from headwater.bench.conversation import Conversation, Exchange

    told = Conversation(name="long", sha256="", exchanges=(Exchange(question="Go on?", answer="word " * 80),) * 2)
    found = row(compare(engine(), told, settings(budget=64)), "streaming-llm-turns")
    assert [turn.tokens for turn in found.turns] == [400, 400]
    assert all(turn.held <= 64 for turn in found.turns)


def test_speed_is_sampled_along_the_way_from_the_median_step(measured: Results) -> None:
    found = row(measured, "streaming-llm")
    assert [sample.turn for sample in found.tokens_per_s] == [turn.turn for turn in found.turns]
    assert {sample.tokens_per_s for sample in found.tokens_per_s} == {4.0}
    assert [(sample.seen, sample.held) for sample in found.tokens_per_s] == [(t.seen, t.held) for t in found.turns]


def test_timing_an_answer_changes_nothing_of_its_perplexity(measured: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.bench.measure.SPEED_SAMPLES", 0)
    untimed = compare(engine(), conversation(), settings())
    assert not row(untimed, "streaming-llm-turns").tokens_per_s
    for one, other in zip(measured.rows, untimed.rows, strict=True):
        assert [turn.nll for turn in one.turns] == pytest.approx([turn.nll for turn in other.turns])


def test_what_was_kept_is_recorded_as_ranges(measured: Results) -> None:
    last = row(measured, "streaming-llm").kept[-1]
    assert last.turn == 24
    (head, window) = last.ranges
    assert head == (0, HEAD)
    assert window[1] - window[0] == 128 - HEAD
    assert ranges(np.array([], dtype=np.int64)) == ()
    assert ranges(np.array([0, 1, 5, 7, 8])) == ((0, 2), (5, 6), (7, 9))


def test_samples_are_spread_evenly_with_both_ends() -> None:
    assert spread(5, 20) == [0, 1, 2, 3, 4]
    assert spread(101, 5) == [0, 25, 50, 75, 100]
    assert spread(1, 20) == [0]


REFUSED = [
    # settings, the error, what it says
    ({"policies": ("full", "fulll")}, UnknownName, "sliding-window, snapkv, streaming-llm, streaming-llm-turns"),
    ({"policies": ()}, UsageError, "no policy given; known: full"),
    ({"policies": ("full", "full")}, UsageError, "'full' is given 2 times"),
    ({"budget": 0}, BudgetError, "at least 1"),
    ({"budget": HEAD}, BudgetError, f"takes {HEAD} tokens and the budget is {HEAD}"),
    ({"sinks": -1}, BudgetError, "sinks must be at least 0"),
    ({"sinks": -1, "policies": ("sliding-window",)}, BudgetError, "sinks must be at least 0"),
    ({"sinks": 128}, BudgetError, "sinks must be below the budget of 128"),
    ({"budget": 8192}, BudgetError, "8193"),
    ({"limit": 0}, UsageError, "limit_tokens must be at least 1"),
    (
        {"policies": ("h2o", "full")},
        UnsupportedCall,
        "would work: full, sliding-window, streaming-llm; of the rows asked",
    ),
    ({"policies": ("random", "full")}, UnsupportedCall, "would work: sliding-window, streaming-llm; of the rows asked"),
]


class Untouched(FakeEngine):
    """Fails the test when a token is fed."""

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> FakeStream:
        stream = super().open(window, reindex=reindex, limit_tokens=limit_tokens)

        def refuse(tokens: Sequence[int]) -> NDArray[np.float32]:
            raise AssertionError("a token was fed")

        stream.feed = refuse  # pyright: ignore[reportAttributeAccessIssue]
        return stream


@pytest.mark.parametrize(("changes", "kind", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_cannot_run_is_refused_before_the_first_token(
    changes: dict[str, object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        compare(Untouched(), conversation(), settings(**changes))  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value)


def test_a_row_the_engine_cannot_run_is_refused_naming_those_it_can() -> None:
    class NoWindows(Untouched):
        def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> FakeStream:
            if window is not None:
                raise UnsupportedCall("no windows here")
            return super().open(window, reindex=reindex, limit_tokens=limit_tokens)

    with pytest.raises(UnsupportedCall) as caught:
        compare(NoWindows(), conversation(), settings())
    assert "policy sliding-window cannot run on fake: no windows here" in str(caught.value)
    assert "these can: full" in str(caught.value)


def test_pins_are_the_longer_of_sinks_and_system_prompt() -> None:
    numbers = {"budget": 128, "limit_tokens": 400, "engine": engine()}
    for sinks, head, pins in ((4, 30, 30), (4, 2, 4), (0, 0, 0)):
        made = plan("streaming-llm", sinks=sinks, head_tokens=head, **numbers)
        assert made.holds == Window(budget=128, pins=pins)
        made = plan("streaming-llm-turns", sinks=sinks, head_tokens=head, **numbers)
        assert made.holds == Window.of(128, pins) and made.whole_turns


def test_no_finite_probability_is_an_error_that_names_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "score", lambda self, tokens: np.full(len(tokens), -np.inf))
    with pytest.raises(HeadwaterError, match="no finite probability in turn 2"):
        compare(engine(), conversation(), settings(policies=("full",)))


class Interrupted(FakeEngine):
    """Presses Ctrl-C when the third row has fed half of the conversation."""

    opened = 0

    def open(self, window: Held, *, reindex: bool = True, limit_tokens: int | None = None) -> FakeStream:
        stream = super().open(window, reindex=reindex, limit_tokens=limit_tokens)
        self.opened += 1
        score = stream.score

        def interrupt(tokens: Sequence[int]) -> NDArray[np.float64]:
            if self.opened == 4 + 1 + 3 and stream.seen > 300:  # each row tried, the warm-up, two rows whole
                raise KeyboardInterrupt
            return score(tokens)

        stream.score = interrupt  # pyright: ignore[reportAttributeAccessIssue]
        return stream


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "open_engine", lambda model, engine: Interrupted(name=model))
    assert run(model="fake", engine="fake", output=tmp_path, budget=200, turns=24) == 130
    value = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [(row["name"], row["complete"]) for row in value["rows"]] == [
        ("full", True),
        ("sliding-window", True),
        ("streaming-llm", False),
    ]
    partial = value["rows"][2]
    assert partial["stopped_because"] == f"interrupted after turn {partial['turns'][-1]['turn']}"
    assert f"what was measured is in {tmp_path / 'results.json'}" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()


def test_ctrl_c_before_anything_was_measured_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older file in the same folder must not be taken for this run's."""
    (tmp_path / "results.json").write_text("older", encoding="utf-8")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(door, "compare", interrupt)
    assert run(model="fake", engine="fake", output=tmp_path) == 130
    assert "nothing was measured yet" in capsys.readouterr().err


def test_run_writes_json_page_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model="fake", engine="fake", output=tmp_path / "new", budget=200, turns=10, seed=3, system="Short.") == 0
    value = json.loads((tmp_path / "new" / "results.json").read_text(encoding="utf-8"))
    for key in ("schema", "hardware", "versions", "seed", "settings", "model", "conversation", "started", "rows"):
        assert key in value
    assert value["seed"] == 3 and value["settings"]["system"] == "Short."
    assert {"cpu", "cores", "memory_bytes", "platform"} <= value["hardware"].keys()
    assert {"headwater", "python", "numpy"} <= value["versions"].keys()
    assert len(value["conversation"]["sha256"]) == 64
    for found in value["rows"]:
        assert {"perplexity_before", "perplexity_after", "perplexity_over_full", "cache_bytes", "tokens_per_s"} <= set(
            found
        )
        assert {"name", "turns_completed", "stopped_because", "duration_s", "turns", "kept"} <= set(found)
        assert len(found["cache_bytes"]) == 5
        assert found["tokens_per_s"][0].keys() == {"turn", "seen", "held", "tokens_per_s"}
    out = capsys.readouterr()
    assert "turns completed" in out.out and str(tmp_path / "new" / "index.html") in out.out
    assert "the first 10 of 202 turns" in out.err and "seed 3" in out.err
    assert (tmp_path / "new" / "index.html").exists()


def test_a_system_prompt_of_the_conversation_gives_way_and_that_is_told() -> None:
    changed = door._with_system(conversation(), "Other.")
    assert changed.system == "Other."
    assert "takes the place of the conversation's own" in changed.choices[-1]
    assert door._with_system(conversation(system=None), "Other.").choices == ()
    with pytest.raises(UsageError, match="empty"):
        door._with_system(conversation(), " ")


def test_a_system_prompt_of_the_template_is_pinned_and_told() -> None:
    told = compare(FakeEngine(default_system="You are fake."), conversation(system=None), settings())
    assert any("chat template brings its own" in choice for choice in told.choices)
    assert told.pinned_tokens == told.head_tokens > 4


def test_without_matplotlib_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.bench.style.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'headwater\[report\]'"):
        run(model="fake", engine="fake")


def test_an_output_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(door, "open_engine", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(HeadwaterError, match="cannot be written"):
        run(model="fake", engine="fake", output=tmp_path / "file" / "report")


def test_nothing_heavy_is_imported_with_the_door() -> None:
    code = "import sys, headwater.bench.compare, headwater.bench.stream; print(*sys.modules)"
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not {"torch", "transformers", "matplotlib", "rich"} & set(done.stdout.split())
