"""The table and the page of a comparison: from stored JSON only, self-contained, escaped, with its figures."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.bench import report, table
from headwater.bench.compare import compare
from headwater.bench.progress import Lines, progress
from headwater.bench.results import Results, Row, Speed, Turn, read, write_json
from tests.bench.tags import Tags, check_stands_alone
from tests.bench.talk import conversation, engine, settings, ticking


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("stored") / "results.json"
    write_json(path, compare(engine(), conversation(30), settings(), clock=ticking()))
    return read(path)


@pytest.fixture(scope="module")
def page(stored: Results) -> str:
    return report.page(stored)


def test_the_page_stands_alone(page: str) -> None:
    check_stands_alone(page)


def test_the_page_has_four_plots_both_themes_and_a_viewport(page: str) -> None:
    read = Tags(page)
    plots = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert len(plots) == 4
    assert all(plot["aria-label"] and "viewbox" in plot and "width" not in plot for plot in plots)
    assert "prefers-color-scheme: dark" in page and "var(--ink)" in page
    assert any(attributes.get("name") == "viewport" for tag, attributes in read.tags if tag == "meta")


def test_no_colour_of_a_plot_is_left_out_of_the_themes(page: str) -> None:
    """A colour written into a plot would be drawn dark on dark; only black for clip paths may stay."""
    plots = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", plots)) <= {"#000000"}


def test_the_same_results_give_the_same_page(stored: Results, page: str) -> None:
    assert report.page(stored) == page


def test_every_text_is_escaped(stored: Results) -> None:
    bad = "<script>alert(1)</script>&\"'"
    source = replace(stored.conversation, name=bad, attribution=bad, sha256=bad)
    rows = tuple(replace(row, name="<i>", stopped_because=bad, rule=bad) for row in stored.rows)
    told = replace(stored, model=bad, engine=bad, choices=(bad,), conversation=source, rows=rows, hardware={"cpu": bad})
    told = replace(told, settings=replace(stored.settings, system=bad), versions={bad: bad})
    page = report.page(told)
    assert "<script" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page and "&lt;i&gt;" in page


def test_every_figure_of_the_findings_is_in_the_results(stored: Results) -> None:
    row = next(row for row in stored.rows if row.name == "streaming-llm")
    changed = replace(row, perplexity_before=11.11, perplexity_after=22.22, perplexity_over_full=3.33)
    changed = replace(changed, perplexity_over_full_interval=(2.22, 4.44), first_eviction_turn=55)
    rows = tuple(changed if found.name == row.name else found for found in stored.rows)
    said = "\n".join(report.findings(replace(stored, rows=rows)))
    for figure in ("22.2 from its first eviction in turn 55 on", "11.1 before it", "3.33 times", "2.22 to 4.44"):
        assert figure in said
    full = next(row for row in stored.rows if row.name == "full")
    assert f"passes its limit of 400 tokens after {full.turns_completed} of 60 turns" in said


def test_a_page_of_an_interrupted_or_empty_comparison_is_drawn(stored: Results) -> None:
    partial = replace(stored.rows[1], turns=(), tokens_per_s=(), kept=(), cache_bytes=(), complete=False)
    assert "stopped early" in report.page(replace(stored, rows=(stored.rows[0], partial)))
    assert "<svg" not in report.page(replace(stored, rows=()))


def test_one_row_with_one_turn_is_drawn() -> None:
    assert report.page(compare(engine(), conversation(1), settings(policies=("streaming-llm",)))).count("<svg") == 4


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_summary_picture_is_written(stored: Results, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"summary.{suffix}"
    report.summary(stored, path)
    assert path.read_bytes()[:5] == (b"\x89PNG\r" if suffix == "png" else b"<?xml")


def made(sizes: list[int] | None = None, speeds: list[float] | None = None) -> Row:
    samples = tuple(Speed(turn=1, seen=1, held=1, tokens_per_s=speed) for speed in speeds or [])
    return Row(name="row", rule="", cache_bytes=tuple(sizes or ()), tokens_per_s=samples)


STEADY = [
    # sizes, bytes at the end and whether they still grow
    ([], None),
    ([8], (8, False)),
    ([1, 2, 3, 4, 5, 6, 7, 8], (8, True)),
    ([1, 2, 4, 4, 4, 4, 4, 4], (4, False)),
    ([1, 2, 6, 4, 6, 4, 6, 4], (4, False)),  # whole turns come and go
]


@pytest.mark.parametrize(("sizes", "steady"), STEADY)
def test_the_cache_is_flat_or_growing(sizes: list[int], steady: tuple[int, bool] | None) -> None:
    assert table.steady_cache(made(sizes)) == steady


def test_the_speed_of_the_steady_state_is_held_against_the_start() -> None:
    assert table.steady_speed(made(speeds=[8, 8, 5, 4, 4, 4, 4, 2])) == (4, 0.5)
    assert table.steady_speed(made(speeds=[8])) == (8, None)
    assert table.steady_speed(made()) is None


FIGURES = [(None, "–"), (1.234, "1.23"), (12.34, "12.3"), (999.4, "999.4"), (12345.6, "12,346")]  # noqa: RUF001


@pytest.mark.parametrize(("value", "text"), FIGURES)
def test_figures_are_written_with_three_digits_or_more(value: float | None, text: str) -> None:
    assert table.figure(value) == text


def test_bytes_are_written_in_a_unit_that_reads_well() -> None:
    assert [table.size(count) for count in (512, 2048, 3 << 20, 5 << 30)] == ["512 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_the_table_is_plain_text_off_a_terminal(stored: Results) -> None:
    out = io.StringIO()
    table.show(stored, out)
    lines = out.getvalue().splitlines()
    assert lines[0].split("  ")[0] == "policy"
    assert [line.split()[0] for line in lines[1:5]] == [row.name for row in stored.rows]
    assert "\x1b" not in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_is_drawn_on_a_terminal(stored: Results) -> None:
    out = Terminal()
    table.show(stored, out)
    assert "━" in out.getvalue()


def test_progress_is_a_few_lines_off_a_terminal_and_bars_on_one() -> None:
    out = io.StringIO()
    with progress(out) as shown:
        assert isinstance(shown, Lines)
        shown.start("full", 100)
        for _ in range(100):
            shown.advance()
    assert out.getvalue().splitlines() == [f"full: {count} of 100" for count in (25, 50, 75, 100)]
    drawn = Terminal()
    with progress(drawn) as shown:
        shown.start("full", 4)
        shown.advance(4)
    assert "4/4" in drawn.getvalue()


def test_a_turn_without_a_perplexity_leaves_a_gap_in_the_line() -> None:
    from headwater.bench.plots import smoothed

    turns = [Turn(turn=2, nll=1e9, tokens=1, seen=1, held=1, cache_bytes=1, evicted=0)]
    assert str(smoothed(turns)[0]) == "nan"
