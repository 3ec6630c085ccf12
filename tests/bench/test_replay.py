"""What `headwater replay` does with a trace: which policies at which budgets, the same figures as the library's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.bench.replay import experiment, run, state_bytes
from headwater.bench.replay_plan import Plan, expand, plan
from headwater.bench.replay_results import ReplayResults, Settings, by_layer, read, source
from headwater.bench.replay_trace import Part, Watched, open_trace
from headwater.bench.results import to_json, write_json
from headwater.errors import BudgetError, InputFileError, MissingExtra, UnknownName, UsageError
from headwater.policies import POLICIES, policy
from headwater.traces import Chunk, Trace, replay
from headwater.traces.canonical import canonical_trace
from headwater.traces.oracle import oracle
from tests.bench.traces import LAYERS, several_heads

NOTHING = {"sinks": None, "recent_window": None, "seed": None}
BUDGETS = (34, 48)


def settings(names: tuple[str, ...], **changes: Any) -> Settings:
    asked: dict[str, Any] = {
        "trace": "canonical",
        "policies": names,
        "budgets": BUDGETS,
        "sinks": None,
        "recent_window": None,
        "seed": None,
        "tokens": None,
        "layers": None,
        "heads": None,
        "shown_budget": 48,
        "shown_row": 1,
    }
    return Settings(**asked | changes)


def replayed(trace: Trace, names: tuple[str, ...] = ("all", "random", "full")) -> ReplayResults:
    planned = plan(expand(names), budgets=BUDGETS, tokens=trace.tokens, parameters=NOTHING)
    shown = settings(expand(names), shown_row=trace.rows // 2)
    return experiment(trace, source(trace, {"Model": "none"}), shown, planned, clock=iter(range(99)).__next__)


@pytest.fixture(scope="module")
def measured() -> ReplayResults:
    return replayed(several_heads())


# What is replayed


def test_all_is_every_policy_but_the_yardsticks() -> None:
    assert expand(("all",)) == tuple(name for name in POLICIES if name not in {"full", "random"})
    assert expand(("oracle", "all", "full"))[0] == "oracle"
    assert expand(("oracle", "all", "full"))[-1] == "full"


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (("lru",), UnknownName, "unknown policy 'lru'; known: full, "),
        (("h2o", ""), UnknownName, "unknown policy ''"),
        (("full", "full"), UsageError, "policy 'full' is given 2 times"),
        (("all", "streaming-llm"), UsageError, "policy 'streaming-llm' is given 2 times"),
        ((), UsageError, "no policy given; known: full, "),
    ],
)
def test_names_that_cannot_be_used_are_refused(names: tuple[str, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace(".", r"\.")):
        expand(names)


def test_an_unknown_name_is_told_of_all_and_oracle() -> None:
    with pytest.raises(UnknownName, match=r"oracle.*; also accepted: all \(sliding-window"):
        expand(("lru",))


def test_each_policy_is_made_for_each_budget_and_full_for_the_whole_trace() -> None:
    made = plan(("full", "tova", "oracle"), budgets=(64, 32), tokens=100, parameters=NOTHING)
    assert [(each.name, each.budget) for each in made.policies] == [("full", 100), ("tova", 32), ("tova", 64)]
    assert made.oracle_budgets == (32, 64)
    assert made.choices == ("full keeps all 100 tokens, whatever the budgets",)


def test_parameters_go_to_those_who_have_them_and_the_others_are_named() -> None:
    asked = {"sinks": 2, "recent_window": 8, "seed": 5}
    made = plan(("sliding-window", "streaming-llm", "h2o", "random"), budgets=(16,), tokens=32, parameters=asked)
    sliding, streaming, h2o, random = made.policies
    assert (streaming, h2o, random) == (
        policy("streaming-llm", budget=16, sinks=2),
        policy("h2o", budget=16, sinks=2, recent_window=8),
        policy("random", budget=16, sinks=2, seed=5),
    )
    assert sliding == policy("sliding-window", budget=16)
    assert made.choices == (
        "sinks 2 goes to streaming-llm, h2o, random, not to sliding-window",
        "recent_window 8 goes to h2o, not to sliding-window, streaming-llm, random",
        "seed 5 goes to random, not to sliding-window, streaming-llm, h2o",
    )


@pytest.mark.parametrize(("parameter", "owners"), [("sinks", "streaming-llm"), ("recent_window", "h2o")])
def test_a_parameter_that_none_of_them_has_is_refused(parameter: str, owners: str) -> None:
    with pytest.raises(
        UsageError, match=rf"none of sliding-window, full has .*'{parameter}'.*these have it: .*{owners}"
    ):
        plan(("sliding-window", "full"), budgets=(16,), tokens=32, parameters=NOTHING | {parameter: 1})


def test_a_budget_must_be_below_the_tokens() -> None:
    plan(("tova",), budgets=(31,), tokens=32, parameters=NOTHING)
    with pytest.raises(BudgetError, match="a budget of 32 is not below the 32 tokens of the trace"):
        plan(("tova",), budgets=(16, 32), tokens=32, parameters=NOTHING)


def test_a_budget_is_given_once_and_fits_the_policy() -> None:
    with pytest.raises(UsageError, match="a number is given twice in 16, 16"):
        plan(("tova",), budgets=(16, 16), tokens=32, parameters=NOTHING)
    with pytest.raises(BudgetError, match="h2o: recent_window"):
        plan(("h2o",), budgets=(16,), tokens=64, parameters=NOTHING)


# The trace


def test_a_part_of_a_trace_is_those_rows_and_those_steps() -> None:
    whole = several_heads(40)
    part = Part(whole, tokens=17, layers=(4, 0), heads=(2,))
    assert [(head.layer, head.head) for head in part.heads] == [(0, 2), (4, 2)]
    assert np.array_equal(part.whole(), whole.whole()[[1, 5], :16, :17])
    for chunk_bytes in (1, 1000):
        assert sum(len(chunk.steps) for chunk in part.chunks(chunk_bytes)) == 16


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layers": (0, 1)}, "several heads has no layer 1; it has 0, 3-4"),
        ({"heads": (0,)}, "several heads has no head 0; it has 1-2"),
        ({"tokens": 97}, "several heads has 96 tokens, so its first 97 cannot be taken"),
    ],
)
def test_a_part_that_is_not_there_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Part(several_heads(), **asked)


def test_the_canonical_trace_is_opened_by_name_at_any_length() -> None:
    trace, stored = open_trace("canonical", tokens=300)
    assert np.array_equal(trace.whole(), canonical_trace().whole()[:, :299, :300])
    assert (stored.name, stored.tokens, stored.heads) == ("decode-300", 300, ((0, 0),))
    with pytest.raises(UsageError, match="decode-300 has no layer 1; it has 0"):
        open_trace("canonical", tokens=300, layers=(1,))


class Counting:
    def __init__(self) -> None:
        self.told = list[str | int]()

    def start(self, name: str, total: int) -> None:
        self.told += [name, total]

    def advance(self, steps: int = 1) -> None:
        self.told.append(steps)


def test_a_watched_trace_tells_of_every_chunk_when_it_is_used_up() -> None:
    bars = Counting()
    chunks = Watched(several_heads(20), bars, "reading").chunks(20 * 4 * 6 * 8)
    first = next(chunks)
    assert (len(first.steps), bars.told) == (8, ["reading", 19])
    assert [len(chunk.steps) for chunk in chunks] == [8, 3]
    assert bars.told == ["reading", 19, 8, 8, 3]


# What comes out


@pytest.mark.parametrize("trace", [several_heads(), canonical_trace(tokens=300)], ids=lambda trace: trace.name)
def test_every_figure_is_the_library_s(trace: Trace, measured: ReplayResults) -> None:
    results = measured if trace.rows > 1 else replayed(trace)
    assert results.complete
    names = expand(("all", "random"))
    assert len(results.rows) == 2 * len(names) + 1
    for row in results.rows:
        alone = replay(trace, row.policy, budget=row.budget, **row.parameters)
        assert (row.retained_attention_mass, row.heavy_hitter_recall, row.eviction_calls) == (
            alone.retained_attention_mass,
            alone.heavy_hitter_recall,
            alone.eviction_calls,
        )
        assert row.way == alone.way
        assert row.mass_by_head == tuple(alone.mass_by_row)
        assert row.recall_by_head == tuple(alone.recall_by_row)
        shown = row.budget == 48
        assert row.left == (tuple(alone.left[results.settings.shown_row]) if shown else None)


def test_full_keeps_everything_and_is_its_own_budget(measured: ReplayResults) -> None:
    (full,) = (row for row in measured.rows if row.policy == "full")
    assert (full.budget, full.retained_attention_mass, full.heavy_hitter_recall) == (96, 1.0, 1.0)
    assert (full.eviction_calls, full.state_bytes) == (0, 0)


def test_the_best_stands_first(measured: ReplayResults) -> None:
    for budget in BUDGETS:
        masses = [row.retained_attention_mass for row in measured.at(budget)]
        assert masses == sorted(masses, reverse=True)
        assert len(masses) == len(expand(("all", "random")))


def test_the_mean_of_a_layer_is_over_its_heads(measured: ReplayResults) -> None:
    row = measured.rows[0]
    assert by_layer(row, measured.trace) == pytest.approx(
        np.array(row.mass_by_head).reshape(len(LAYERS), 2).mean(axis=1)
    )


def test_state_is_counted_over_all_heads() -> None:
    trace = several_heads()
    assert state_bytes(policy("tova", budget=48), trace) == 6 * 49 * 13
    assert state_bytes(policy("full", budget=96), trace) == 0


def test_the_json_comes_back_the_same(measured: ReplayResults, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, measured)
    assert read(path) == measured
    assert json.loads(path.read_text()) == json.loads(to_json(measured))


def test_numbers_of_a_row_share_a_line_of_the_json(measured: ReplayResults) -> None:
    lines = to_json(measured).splitlines()
    assert any(line.strip().startswith('"left": [') and line.count(",") >= 95 for line in lines)
    assert '"budgets": [34, 48],' in to_json(measured)


def test_a_damaged_or_foreign_file_is_refused(measured: ReplayResults, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for change in ({"schema": "headwater/compare/1"}, {"rows": [{"policy": "h2o"}]}, {"trace": None}, {"extra": 1}):
        path.write_text(json.dumps(json.loads(to_json(measured)) | change))
        with pytest.raises(InputFileError, match=r"results\.json"):
            read(path)


def test_the_oracle_comes_after_the_others_at_each_budget_and_bounds_them() -> None:
    trace = several_heads(64)
    stored = list[ReplayResults]()
    names = ("tova", "oracle", "random")
    planned = plan(names, budgets=BUDGETS, tokens=64, parameters=NOTHING)
    experiment(trace, source(trace, {}), settings(names), planned, store=stored.append)
    assert [(len(found.rows), found.complete) for found in stored] == [(4, False), (5, False), (6, True)]
    for row, budget in zip(stored[-1].rows[4:], BUDGETS, strict=True):
        alone = oracle(trace, budget)
        assert (row.policy, row.budget, row.way) == ("oracle", budget, alone.way)
        assert row.retained_attention_mass == alone.retained_attention_mass
        assert stored[-1].at(budget)[0] == row
        assert row.state_bytes == row.state_bytes_per_slot == 0
    assert stored[-1].rows[-1].left == tuple(oracle(trace, 48).left[1])


def test_the_oracle_needs_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingExtra, match=r"numba is not installed; run: pip install 'headwater\[lab\]'"):
        plan(("tova", "oracle"), budgets=(32,), tokens=64, parameters=NOTHING)


# Told to the user


@pytest.mark.parametrize(
    ("names", "slow"), [(("tova", "streaming-llm", "random"), "tova, random"), (("sliding-window",), None)]
)
def test_without_numba_the_header_says_what_to_install(
    names: tuple[str, ...], slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    told = replayed(several_heads(48 + 1), names).choices
    line = f"without numba these go by their rules, slowly: {slow}; run: pip install 'headwater[lab]'"
    assert told == ((line,) if slow else ())


# Interruptions


class Failing(Trace):
    """A trace that is interrupted after some chunks."""

    def __init__(self, trace: Trace, error: type[BaseException]) -> None:
        self._trace, self._error = trace, error
        self.name, self.tokens, self.heads = trace.name, trace.tokens, trace.heads

    def chunks(self, chunk_bytes: int = 1) -> Iterator[Chunk]:
        yield next(iter(self._trace.chunks(4 << 10)))
        raise self._error


def test_ctrl_c_in_the_pass_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Failing(several_heads(), KeyboardInterrupt)
    monkeypatch.setattr("headwater.bench.replay.open_trace", lambda *_, **__: (trace, source(trace, {})))
    assert run(policies=("streaming-llm",), budgets=(16,), output=tmp_path / "out") == 130
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1] == "Interrupted; nothing was replayed to its end"
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_in_the_oracle_keeps_what_was_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwater.bench.replay.oracle", interrupted)
    assert run(policies=("streaming-llm", "oracle"), budgets=(16,), tokens=64, output=tmp_path) == 130
    _, err = capsys.readouterr()
    path = tmp_path / "results.json"
    assert err.splitlines()[-1] == f"Interrupted; what was replayed is in {path}; no page was drawn from it"
    assert [row.policy for row in read(path).rows] == ["streaming-llm"] and not read(path).complete
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_without_policies_is_only_the_bound() -> None:
    assert plan(("oracle",), budgets=(16,), tokens=32, parameters=NOTHING) == Plan(
        policies=(), oracle_budgets=(16,), choices=()
    )
