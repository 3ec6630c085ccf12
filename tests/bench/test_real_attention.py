"""The page about real attention says what the stored figures say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import real_attention_page as page

RESULTS: dict[str, Any] = json.loads(page.STORED.read_text(encoding="utf-8"))
TEXTS = list(RESULTS["where"])
BUDGETS: list[int] = RESULTS["budgets"]


def mass(text: str, name: str, budget: int) -> float:
    return RESULTS["replay"][text][name][str(budget)]["retained_attention_mass"]


def test_the_tables_are_those_of_the_stored_figures() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.with_blocks(text, page.blocks(RESULTS)), "run: python -m bench.real_attention_page"


@pytest.mark.parametrize("text", TEXTS)
def test_the_sink_is_one_token_and_begins_in_layer_12(text: str) -> None:
    first, others = RESULTS["where"][text]["first"], RESULTS["where"][text]["other_sinks"]
    assert sum(first) / len(first) > 0.25
    assert sum(others) / len(others) < 0.01
    assert max(first[:12]) < 0.1
    assert 0.25 < min(first[12:]) < max(first[12:]) < 0.68


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_the_page_says_of_the_texts(text: str, budget: int) -> None:
    assert page.ranked(RESULTS, text, budget)[0] == "tova"
    assert min(mass(text, name, budget) for name in ("h2o", "scissorhands")) > mass(text, "streaming-llm", budget)
    near = abs(mass(text, "pyramidkv", budget) - mass(text, "snapkv", budget)) < 0.01
    assert near == (budget >= 128)
    if budget >= 128:
        assert abs(mass(text, "sliding-window", budget) - mass(text, "random", budget)) < 0.02
        assert page.ranked(RESULTS, text, budget)[1] == "snapkv"
    for name in ("h2o", "scissorhands", "snapkv"):
        assert abs(mass(text, f"{name} + 4 sinks", budget) - mass(text, name, budget)) < 0.005


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_the_page_says_of_the_canonical_trace(budget: int) -> None:
    assert max(mass("canonical", name, budget) for name in ("h2o", "scissorhands")) < mass(
        "canonical", "streaming-llm", budget
    )
    assert (page.ranked(RESULTS, "canonical", budget)[0] == "snapkv") == (budget in (128, 256))
