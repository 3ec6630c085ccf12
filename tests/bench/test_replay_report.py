"""The table and the page of a replay: from stored JSON only, self-contained, with every figure."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from headwater.bench import replay_plots as plots
from headwater.bench import replay_report as report
from headwater.bench import style
from headwater.bench.replay_findings import findings
from headwater.bench.replay_results import ReplayResults, Row, read
from headwater.bench.results import write_json
from headwater.policies import POLICIES
from headwater.traces.canonical import canonical_trace
from tests.bench.tags import Tags, check_stands_alone
from tests.bench.test_replay import replayed
from tests.bench.traces import several_heads


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> ReplayResults:
    path = tmp_path_factory.mktemp("stored") / "results.json"
    write_json(path, replayed(several_heads(), ("streaming-llm", "tova", "pyramidkv", "random", "full")))
    return read(path)


@pytest.fixture(scope="module")
def one_head() -> ReplayResults:
    return replayed(canonical_trace(tokens=128), ("sliding-window", "streaming-llm"))


@pytest.fixture(scope="module")
def page(stored: ReplayResults) -> str:
    return report.page(stored)


# The page


def test_the_page_stands_alone(page: str) -> None:
    check_stands_alone(page)


def test_a_trace_of_several_heads_has_maps_and_layers_beside_what_every_trace_has(
    page: str, one_head: ReplayResults
) -> None:
    def labels(text: str) -> list[str]:
        return [str(attributes["aria-label"]).partition(",")[0] for tag, attributes in Tags(text).tags if tag == "svg"]

    always = ["Retained attention mass by budget", "Heavy-hitter recall by budget", "Positions held along the trace"]
    assert labels(report.page(one_head)) == always
    assert labels(page) == [
        *always,
        "Retained attention mass of the heads",
        "Attention lost by every head",
        "Retained attention mass by layer",
    ]


def test_every_figure_of_every_row_is_on_the_page_and_in_the_table(stored: ReplayResults, page: str) -> None:
    out = io.StringIO()
    report.show(stored, out)
    for row in stored.rows:
        low, high = np.quantile(row.mass_by_head, (0.1, 0.9))
        state = str(row.state_bytes_per_slot) if row.state_bytes_per_slot else "–"  # noqa: RUF001
        cells = [
            row.policy,
            str(row.budget),
            f"{row.retained_attention_mass:.6f}",
            f"{low:.3f} to {high:.3f}",
            f"{row.heavy_hitter_recall:.6f}",
            f"{row.eviction_calls:,}",
            state,
        ]
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
        assert any(re.split(r"\s{2,}", line)[:7] == cells for line in out.getvalue().splitlines())


def test_the_table_is_grouped_by_budget_and_says_how_each_was_replayed(stored: ReplayResults) -> None:
    out = io.StringIO()
    report.show(stored, out)
    groups = [part.splitlines() for part in out.getvalue().strip().split("\n\n")]
    columns, first = groups[0][0], groups[0][1:]
    assert columns.split()[0] == "policy" and "10th to 90th percentile of heads" in columns
    assert [[line.split()[1] for line in group] for group in (first, *groups[1:-1])] == [
        ["34"] * len(first),
        ["48"] * len(first),
        ["96"],
    ]
    said = dict(line.split(": ") for line in groups[-1])
    for way, names in said.items():
        assert {row.way for row in stored.rows if row.policy in names.split(", ")} == {way}
    assert sum(len(names.split(", ")) for names in said.values()) == len({row.policy for row in stored.rows})


def test_one_head_has_no_spread(one_head: ReplayResults) -> None:
    assert "10th to 90th percentile of heads" not in report.columns(one_head)
    assert "percentile" not in report.page(one_head)


def test_only_the_colours_of_the_maps_do_not_follow_the_theme(page: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) - set(style.shades(len(levels_of(drawn)))) <= {"#000000"}


def levels_of(drawn: str) -> set[str]:
    return set(re.findall(r"#[0-9a-f]{6}\b", drawn)) - {"#000000"}


def test_every_policy_has_a_look_of_its_own() -> None:
    """Also for readers without colours."""
    looks = [style.look(0, name) for name in (*POLICIES, "oracle")]
    assert len({look.marker for look in looks}) == len(looks)
    assert len({(look.color, str(look.line)) for look in looks}) == len(looks)


def test_the_same_results_give_the_same_page(stored: ReplayResults, page: str) -> None:
    assert report.page(stored) == page


def test_every_text_is_escaped(one_head: ReplayResults) -> None:
    bad = "<script>alert(1)</script>&\"'"
    told = replace(one_head, choices=(bad,), hardware={"cpu": bad}, versions={bad: bad})
    told = replace(told, trace=replace(one_head.trace, name=bad, facts={bad: bad}))
    told = replace(told, rows=tuple(replace(row, policy="<i>", way=bad) for row in one_head.rows))
    shown = report.page(told)
    assert "<script" not in shown and "<i>" not in shown
    assert "&lt;script&gt;" in shown and "&lt;i&gt;" in shown


@pytest.mark.parametrize("names", [("full",), ("random",), ("tova",)])
def test_a_page_of_one_policy_is_drawn(names: tuple[str, ...]) -> None:
    check_stands_alone(report.page(replayed(several_heads(), names)))


def test_a_page_of_one_budget_is_drawn(stored: ReplayResults) -> None:
    alone = replace(
        stored,
        settings=replace(stored.settings, budgets=(48,)),
        rows=tuple(row for row in stored.rows if row.budget == 48),
    )
    check_stands_alone(report.page(alone))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_summary_picture_is_written(stored: ReplayResults, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"summary.{suffix}"
    plots.summary(stored, path)
    assert path.read_bytes()[:5] == (b"\x89PNG\r" if suffix == "png" else b"<?xml")


# What is said


def made(policy: str, budget: int, mass: float, recall: float = 0.5, *, needs: tuple[str, ...] = ("attention",)) -> Row:
    return Row(
        policy=policy,
        budget=budget,
        parameters={},
        needs=needs,
        way="rule",
        retained_attention_mass=mass,
        heavy_hitter_recall=recall,
        eviction_calls=1,
        state_bytes_per_slot=13 if needs else 4,
        state_bytes=(13 if needs else 4) * budget,
        mass_by_head=(mass,),
        recall_by_head=(recall,),
    )


def said(results: ReplayResults, *rows: Row) -> list[str]:
    settings = replace(results.settings, budgets=(32, 64, 96), shown_budget=64)
    return findings(replace(results, settings=settings, rows=rows))


def test_the_policies_are_ranked_at_the_shown_budget(one_head: ReplayResults) -> None:
    rows = made("h2o", 64, 0.7), made("tova", 64, 0.8), made("tova", 32, 0.6), made("h2o", 32, 0.1)
    assert said(one_head, *rows)[:2] == [
        "At a budget of 64 of 128 tokens tova retains 0.800 of the attention, h2o 0.700.",
        "tova leads at 32 tokens with 0.600 and at 64 with 0.800.",
    ]


def test_equals_are_named_together_and_those_that_did_the_same(one_head: ReplayResults) -> None:
    lines = said(one_head, made("snapkv", 64, 0.8), made("pyramidkv", 64, 0.8), made("h2o", 64, 0.7))
    assert lines[0] == "At a budget of 64 of 128 tokens snapkv and pyramidkv retain 0.800 of the attention, h2o 0.700."
    assert lines[-1] == "snapkv and pyramidkv did the same at every budget."


def test_another_leader_at_another_budget_is_told(one_head: ReplayResults) -> None:
    rows = made("h2o", 32, 0.7), made("tova", 32, 0.6), made("h2o", 96, 0.8), made("tova", 96, 0.9)
    assert "The order depends on the budget: h2o leads at 32 tokens (0.700), tova at 96 (0.900)." in said(
        one_head, *rows
    )


def test_what_looking_gains_and_costs_is_told(one_head: ReplayResults) -> None:
    rows = made("streaming-llm", 64, 0.75, needs=()), made("sliding-window", 64, 0.5, needs=()), made("tova", 64, 0.8)
    assert (
        "Looking at the attention gains 0.050: tova 0.800 against streaming-llm 0.750, for 832 B of state in place of "
        "256 B." in said(one_head, *rows)
    )
    assert "loses 0.050" in "".join(said(one_head, *rows[:2], made("tova", 64, 0.7)))


def test_the_yardsticks_measure_the_others_and_do_not_rank(one_head: ReplayResults) -> None:
    rows = [made("tova", 64, 0.8), made("h2o", 64, 0.3), made("random", 64, 0.4, needs=()), made("oracle", 64, 0.9)]
    lines = said(one_head, *rows, made("full", 128, 1.0, needs=()))
    assert lines[0].endswith("tova retains 0.800 of the attention, h2o 0.300.")
    assert "Evicting at random retains 0.400; no more than that: h2o." in lines
    bound = "Knowing the attention to come, 64 tokens in every head could retain 0.900 and no more; "
    assert f"{bound}tova reaches 88.9% of that." in lines
    assert "every policy retains more" in "".join(said(one_head, rows[0], rows[2]))


def test_another_winner_by_recall_is_told(one_head: ReplayResults) -> None:
    lines = said(one_head, made("tova", 64, 0.8, 0.5), made("h2o", 64, 0.7, 0.6))
    assert "By heavy-hitter recall h2o comes first with 0.600; tova has 0.500." in lines
    assert "recall" not in "".join(said(one_head, made("tova", 64, 0.8, 0.6), made("h2o", 64, 0.7, 0.6)))


def test_heads_and_layers_that_differ_are_named(stored: ReplayResults) -> None:
    (row,) = [replace(made("tova", 48, 0.5), mass_by_head=(0.9, 0.8, 0.3, 0.1, 0.5, 0.4))]
    lines = findings(replace(stored, rows=(row,)))
    assert "the worst is layer 3, head 2 with 0.100." in lines[1]
    assert lines[2] == "Layer 3 loses most (0.200 retained), layer 0 least (0.850)."


def test_yardsticks_alone_say_nothing(stored: ReplayResults) -> None:
    assert findings(replace(stored, rows=(made("random", 48, 0.4),))) == []


# How it is drawn


@pytest.mark.parametrize("tokens", [5, 12, 300])
def test_a_cell_is_the_share_of_its_positions_that_is_held(tokens: int) -> None:
    left = np.random.default_rng(tokens).integers(1, tokens + 1, size=tokens)
    left = np.maximum(left, np.arange(tokens))
    share, edges = plots.kept_share(left, tokens)
    cells = min(plots.CELLS, tokens)
    assert share.shape == (cells, cells) and edges[0] == 0 and edges[-1] == tokens
    random = np.random.default_rng(0)
    for row, column in random.integers(cells, size=(200, 2)):
        step = int((edges[column] + edges[column + 1]) / 2)
        inside = range(int(edges[row]), int(edges[row + 1]))
        assert share[row, column] == np.mean([position <= step < left[position] for position in inside])


@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e-7, 1)))
def test_every_loss_lies_between_two_levels_that_the_colours_stand_for(lost: np.ndarray) -> None:
    levels = plots.loss_levels(lost)
    assert levels[0] == 0 and (np.diff(levels) > 0).all() and levels[-1] >= lost.max()
    assert all(f"{level:.0e}"[0] in "125" for level in levels[1:])
    assert len(levels) <= 3 or np.mean(lost <= levels[2]) >= 0.05, "colours for values that hardly any head has"


def test_a_map_has_every_head_in_its_place_and_nothing_where_there_is_none(stored: ReplayResults) -> None:
    trace = replace(stored.trace, heads=((0, 1), (0, 5), (7, 5)))
    row = replace(made("tova", 48, 0.5), mass_by_head=(0.9, 0.8, 0.25))
    assert np.array_equal(plots.lost(row, trace), [[1 - 0.9, np.nan], [1 - 0.8, 0.75]], equal_nan=True)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.floats(0.1, 10))
def test_names_move_apart_no_further_than_they_must(places: list[float], gap: float) -> None:
    wanted = sorted(places)
    found = style.apart(wanted, gap)
    between = np.diff(found)
    assert (between >= gap * (1 - 1e-9) - 1e-9).all()
    if (np.diff(wanted) >= gap).all():
        assert found == pytest.approx(wanted)
    assert np.mean(found) == pytest.approx(np.mean(wanted))


@given(arrays(np.bool_, st.tuples(st.integers(1, 6), st.integers(1, 6))))
def test_cells_cover_what_was_chosen(chosen: np.ndarray) -> None:
    tall, wide = chosen.shape
    with style.canvas(2, 2) as figure:
        axes = figure.add_subplot()
        style.cells(axes, chosen, "#000000", x=np.arange(wide + 1.0), y=np.arange(tall + 1.0))
        covered = np.zeros_like(chosen)
        for patch in axes.patches:
            for corners in patch.get_path().vertices.reshape(-1, 5, 2):  # type: ignore[union-attr]
                (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
                covered[int(low) : int(high), int(left) : int(right)] = True
    assert np.array_equal(covered, chosen)
