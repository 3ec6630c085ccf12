"""The page about policies live says what the stored figures say."""

from __future__ import annotations

import json
from typing import Any

from bench import live_page as page
from bench.page import with_blocks
from tests.cache.test_policy_cache import LOOKING

RESULTS: dict[str, Any] = json.loads(page.STORED.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_stored_figures() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == with_blocks(text, page.blocks(RESULTS)), "run: python -m bench.live_page"


def test_what_was_asked_for_holds() -> None:
    assert RESULTS["kept_sets_equal"] is True
    assert RESULTS["kept_sets_compared"] == RESULTS["kept_sets_alike"] > 10_000
    ratio = RESULTS["tokens_per_s_over_ring"]
    assert set(LOOKING) <= set(ratio)
    assert min(ratio["tova"], ratio["h2o"]) >= 0.85
    assert min(ratio["snapkv"], ratio["pyramidkv"]) >= 0.75


def test_what_the_page_says_of_quality() -> None:
    for by_budget in RESULTS["quality"].values():
        for budget in ("128", "256", "512"):
            each = by_budget[budget]
            perplexity = {name: figures["over_full"] for name, figures in each.items()}
            assert min(perplexity, key=perplexity.__getitem__) == "snapkv"
            assert perplexity["tova"] > perplexity["streaming-llm"]
            assert each["tova"]["retained_mass"] >= max(figures["retained_mass"] for figures in each.values()) - 0.001
            for figures in each.values():
                assert abs(figures["retained_mass"] - figures["retained_mass_replayed"]) < 0.012


def test_what_the_page_says_of_gaps() -> None:
    tova, h2o = RESULTS["positions"]["tova"], RESULTS["positions"]["h2o"]
    for where in ("within", "past"):
        assert tova["none"][where] < 0.9 * tova["compact"][where]
        assert abs(h2o["none"][where] / h2o["compact"][where] - 1) < 0.05


def test_what_the_page_says_of_the_number() -> None:
    found = RESULTS["needle"]
    assert found["full"]["said"] == [1.0] * 5
    for name, each in found.items():
        if name != "full":
            assert each["said"][:-1] == [0.0] * 4, name
    for name in ("h2o", "tova", "scissorhands", "snapkv", "pyramidkv"):
        assert max(found[name]["held"][:-1]) < 0.27
        assert found[name]["held"][-1] < found["sliding-window"]["held"][-1]
