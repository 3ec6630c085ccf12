"""The advice in words, tables and pictures: from the stored results alone, every figure from them."""

from __future__ import annotations

import io
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headwater.bench import advise_report
from headwater.bench.advise_choice import advise
from headwater.bench.advise_results import AdviseResults, Asked, read
from headwater.bench.advise_words import command, header, paragraphs
from headwater.bench.results import write_json
from tests.bench.advice import advised, made
from tests.bench.tags import Tags, check_stands_alone


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> AdviseResults:
    path = tmp_path_factory.mktemp("stored") / "advice.json"
    write_json(path, advised(12))
    return read(path)


@pytest.fixture(scope="module")
def page(stored: AdviseResults) -> str:
    return advise_report.page(stored)


def words(results: AdviseResults) -> str:
    return "\n".join(paragraphs(results))


# By hand: what is said follows from these figures and no others


ROWS = (
    made("full", 5000, 1.0, live=False, cache_bytes=200 << 20, state_bytes=0),
    made("tova", 128, 0.611),
    made("tova", 256, 0.822, heavy_hitter_recall=0.733, cache_bytes=30 << 20, state_bytes=1 << 20),
    made("tova", 512, 0.866),
    *(made("streaming-llm", budget, 0.3) for budget in (128, 512)),
    made("streaming-llm", 256, 0.777, heavy_hitter_recall=0.6, recent_window=235, cache_bytes=29 << 20, state_bytes=0),
    *(made("random", budget, 0.2) for budget in (128, 512)),
    made("random", 256, 0.444, heavy_hitter_recall=0.4),
    *(made("h2o", budget, 0.5, recent_window=32, parameters={"recent_window": 32}) for budget in (128, 256, 512)),
    made("h2o", 256, 0.811, role="window", recent_window=16, parameters={"recent_window": 16}),
    made("h2o", 256, 0.80, role="window", recent_window=64, parameters={"recent_window": 64}),
)


@pytest.fixture
def by_hand(stored: AdviseResults) -> AdviseResults:
    subject = replace(stored.subject, model="my model", engine="transformers", pinned_tokens=21, used_tokens=5000)
    return replace(stored, subject=subject, rows=ROWS, advice=advise(ROWS, Asked(), whole_fits=False))


def test_at_the_bend(by_hand: AdviseResults) -> None:
    best, live = paragraphs(by_hand)
    assert best == (
        "Take tova with a budget of 256 tokens. On this conversation it keeps 82.2% of the attention and 73.3% of each "
        "step's 32 largest weights; a random choice keeps 44.4% and 40.0%. It costs 31.0 MiB, 30.0 MiB of it keys and "
        "values and 1.0 MiB what the policy remembers; keeping the whole conversation costs 200.0 MiB. There the curve "
        "bends: the best policy keeps 61.1% in 128 tokens, 82.2% in 256, and 86.6% in 512. tova has no recent window "
        "to set; of the policies that have one, h2o keeps most, 81.1% with 16."
    )
    assert live == (
        "So far tova can only be replayed: no live cache evicts by attention yet. Of what runs live today, take "
        "streaming-llm with 256 tokens: it pins the first 21 and keeps the 235 most recent. It keeps 77.7% of the "
        "attention and 60.0% of each step's 32 largest weights, for 29.0 MiB:"
    )
    assert command(by_hand) == "headwater chat --model 'my model' --policy streaming-llm --budget 256"


def test_what_keeps_hardly_more_for_more_bytes_is_named(by_hand: AdviseResults) -> None:
    dear = made("snapkv", 256, 0.8221, cache_bytes=30 << 20, state_bytes=20 << 20)
    found = advise((*ROWS, dear), Asked(), whole_fits=False)
    assert "Take tova with" in words(replace(by_hand, advice=found))
    assert "snapkv keeps 82.2%, hardly more, for 50.0 MiB." in words(replace(by_hand, advice=found))
    assert "hardly more" not in words(by_hand)


def test_a_policy_with_a_recent_window_is_taken_with_it(by_hand: AdviseResults) -> None:
    rows = tuple(
        replace(row, retained_attention_mass=row.retained_attention_mass + 0.1) if row.policy == "h2o" else row
        for row in ROWS
    )
    said = words(replace(by_hand, rows=rows, advice=advise(rows, Asked(), whole_fits=False)))
    assert "Take h2o with a budget of 256 tokens and a recent window of 16." in said
    assert "Of the 3 recent windows tried, 16 keeps most; with 32 it is 60.0%." in said


def test_at_a_budget_the_bend_is_told_beside_it(by_hand: AdviseResults) -> None:
    said = words(replace(by_hand, advice=advise(ROWS, Asked(budget=512), whole_fits=False)))
    assert "Take tova with a budget of 512 tokens." in said
    assert "The curve bends at 256 tokens: the best policy keeps 61.1% in 128" in said


def test_in_a_memory_it_says_how_far_the_budgets_lie_apart(by_hand: AdviseResults) -> None:
    rows = (
        *ROWS,
        *(
            made(name, budget, 0.7, role="fit")
            for name, budget in (("sliding-window", 300), ("tova", 280), ("random", 299))
        ),
    )
    asked = Asked(memory_bytes=32 << 20)
    told = replace(by_hand, rows=rows, subject=replace(by_hand.subject, asked=asked))
    told = replace(told, advice=advise(rows, asked, whole_fits=False))
    said = words(told)
    assert "That fills the 32.0 MiB: beside what a policy remembers there is room for" in said
    assert "256 tokens (h2o) to 300 (sliding-window)." in said


def test_a_memory_with_room_for_all_says_until_when(by_hand: AdviseResults) -> None:
    subject = replace(
        by_hand.subject,
        asked=Asked(memory_bytes=300 << 20),
        whole_fits=True,
        kv_bytes_per_token=46080,
        context_length=8192,
    )
    first, *_ = paragraphs(replace(by_hand, subject=subject))
    assert (
        "All of it fits: the 5,000 tokens take 200.0 MiB of 300.0 MiB, and the memory is full only after 6,826."
        in first
    )
    longer = replace(subject, asked=Asked(memory_bytes=900 << 20))
    assert "and the trained length ends only after 8,192." in words(replace(by_hand, subject=longer))


def test_without_a_bend_it_says_so(by_hand: AdviseResults) -> None:
    flat = replace(by_hand.advice, bend=None)
    assert "The curve of retained mass has no bend." in words(replace(by_hand, advice=replace(flat, by="budget")))
    taken = words(replace(by_hand, advice=replace(flat, by="largest")))
    assert "no bend, so the largest budget compared is taken." in taken


def test_what_runs_live_and_is_best_is_not_called_second(by_hand: AdviseResults) -> None:
    advice = replace(by_hand.advice, best=by_hand.advice.live)
    assert paragraphs(replace(by_hand, advice=advice))[-1] == "streaming-llm runs live today:"


def test_the_command_has_what_was_asked_for(by_hand: AdviseResults) -> None:
    subject = replace(by_hand.subject, engine="fake", asked=Asked(sinks=7))
    told = shlex.split(command(replace(by_hand, subject=subject)))
    assert told[-2:] == ["--sinks", "7"] and "--engine" in told
    window = replace(by_hand.advice, live=made("sliding-window", 256, 0.5, recent_window=256))
    plain = replace(by_hand, subject=subject, advice=window)
    assert "--sinks" not in command(plain), "the window has none"
    assert "take sliding-window with 256 tokens: it keeps the 256 most recent." in words(plain)


def test_the_command_is_one_that_the_program_knows(by_hand: AdviseResults, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater import cli

    handed: dict[str, Any] = {}
    terminal = ModuleType("headwater.chat.terminal")
    vars(terminal)["run"] = lambda **options: handed.update(options) or 0
    monkeypatch.setitem(sys.modules, terminal.__name__, terminal)
    program, *arguments = shlex.split(command(by_hand))
    assert program == "headwater" and cli.main(arguments) == 0
    assert (handed["model"], handed["policy"], handed["budget"]) == ("my model", "streaming-llm", 256)


def test_the_header_says_what_is_read_and_every_choice(stored: AdviseResults) -> None:
    subject = replace(stored.subject, choices=("one", "another"))
    told = header(subject).splitlines()
    assert told[-2:] == ["Choice:       one", "Choice:       another"]
    assert f"{subject.conversation.tokens:,} tokens with the chat template" in told[1]
    assert "8 bytes of keys and values for each token" in told[2]


# The page


def test_the_page_stands_alone(page: str) -> None:
    check_stands_alone(page)
    read_ = Tags(page)
    assert sum(tag == "svg" for tag, _ in read_.tags) == 2
    plots = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", plots)) <= {"#000000"}, "a colour outside the themes"


def test_the_page_says_what_the_terminal_says(stored: AdviseResults, page: str) -> None:
    out = io.StringIO()
    advise_report.show(stored, out)
    said, shown = " ".join(Tags(page).words.split()), " ".join(out.getvalue().split())
    for text in (*paragraphs(stored), command(stored)):
        assert text in said and text in shown
    for name in {row.policy for row in stored.rows}:
        assert name in said and name in shown


def test_each_policy_is_listed_once_with_its_best_window_the_best_first(stored: AdviseResults) -> None:
    out = io.StringIO()
    advise_report.show(stored, out)
    lines = out.getvalue().splitlines()[1:10]
    assert [line.split()[0] for line in lines][:2] == ["full", stored.advice.best.policy]
    assert len({line.split()[0] for line in lines}) == 9
    mass = [float(re.findall(r"\d\.\d{4}", line)[0]) for line in lines]
    assert mass == sorted(mass, reverse=True)
    best = max(
        row.retained_attention_mass
        for row in stored.rows
        if row.policy == "h2o" and row.budget == stored.advice.budget and row.role in ("curve", "window")
    )
    assert f"{best:.4f}" in next(line for line in lines if line.startswith("h2o"))


def test_the_same_results_give_the_same_page(stored: AdviseResults, page: str) -> None:
    assert advise_report.page(stored) == page


def test_every_text_is_escaped(stored: AdviseResults) -> None:
    bad = "<script>alert(1)</script>&\"'"
    source = replace(stored.subject.conversation, name=bad, attribution=bad, sha256=bad)
    subject = replace(stored.subject, model=bad, engine=bad, conversation=source, choices=(bad,), hardware={"cpu": bad})
    page = advise_report.page(replace(stored, subject=subject, versions={bad: bad}))
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("asked", [Asked(budget=256), Asked(memory_bytes=9)], ids=["budget", "memory"])
def test_every_kind_of_advice_is_drawn(asked: Asked, by_hand: AdviseResults) -> None:
    fit = tuple(replace(row, role="fit") for row in ROWS if row.budget == 256 and row.role == "curve")
    rows = (*ROWS, *fit)
    subject = replace(by_hand.subject, asked=asked, budgets=(128, 256, 512))
    told = replace(by_hand, subject=subject, rows=rows, advice=advise(rows, asked, whole_fits=False))
    check_stands_alone(advise_report.page(told))


def test_an_advice_in_a_memory_is_drawn_and_listed_with_its_budgets(by_hand: AdviseResults) -> None:
    rows = (
        *ROWS,
        *(
            made(name, budget, 0.7, role="fit")
            for name, budget in (("sliding-window", 300), ("tova", 280), ("random", 299))
        ),
    )
    told = replace(by_hand, rows=rows, advice=advise(rows, Asked(memory_bytes=9), whole_fits=False))
    subject = replace(told.subject, budgets=(128, 256, 512), asked=Asked(memory_bytes=9))
    out = io.StringIO()
    advise_report.show(replace(told, subject=subject), out)
    assert [line.split()[1] for line in out.getvalue().splitlines()[1:6]] == ["5,000", "256", "300", "280", "299"]


def test_a_curve_without_a_bend_is_drawn(stored: AdviseResults) -> None:
    page = advise_report.page(replace(stored, advice=replace(stored.advice, bend=None)))
    assert "bend, " not in re.sub(r"<p>.*?</p>", "", page) and page.count("<svg") == 2


def test_foreign_and_damaged_files_are_refused_by_name(stored: AdviseResults, tmp_path: Path) -> None:
    from headwater.errors import InputFileError

    path = tmp_path / "advice.json"
    write_json(path, stored)
    text = path.read_text(encoding="utf-8")
    for broken, said in (
        (text.replace("headwater/advise/1", "headwater/replay/1"), "expected 'headwater/advise/1'"),
        (text.replace('"by":', '"why":'), "unknown key 'why' in Advice"),
        (text.replace('"advice":', '"advise":'), "not complete"),
        (text[:500], "not a results file"),
    ):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(InputFileError, match=said):
            read(path)
