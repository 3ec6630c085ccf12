"""The page about memory says what the stored figures say."""

from __future__ import annotations

import json
from typing import Any

from bench import memory_page as page
from bench.page import with_blocks

RESULTS: dict[str, Any] = json.loads(page.STORED.read_text(encoding="utf-8"))
HORIZON: dict[str, Any] = RESULTS["recall_horizon"]


def test_the_tables_are_those_of_the_stored_figures() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == with_blocks(text, page.blocks(RESULTS)), "run: python -m bench.memory_page"


def test_what_the_page_says_of_the_horizon() -> None:
    for way in ("window", "sinks and window"):
        assert all(each["right"] in (0, None) for distance, each in HORIZON[way].items() if distance != "0"), way
    there = HORIZON["sinks and window"]["0"]["right"]
    for distance, share in (("1024", 1 / 3), ("4096", 1 / 4)):
        assert abs(HORIZON["with memory"][distance]["right"] / there - share) < 0.02
        assert HORIZON["with summaries"][distance]["right"] < 0.05
    brought = [each["brought"] for each in HORIZON["with memory"].values()]
    assert brought[1:] == sorted(brought[1:], reverse=True)
    assert [round(96 * HORIZON[way]["0"]["right"]) for way in ("with memory", "sinks and window")] == [34, 47]


def test_what_was_asked_for_holds() -> None:
    assert RESULTS["recall_at_5_single_hop"] >= 0.60
    assert RESULTS["recall_at_5_bookings"] >= 0.95
    assert RESULTS["search_ms_10000"] <= 20
    assert RESULTS["search_ms_200000"] <= 100
    assert RESULTS["journal_overhead"] <= 0.02
    assert RESULTS["restore_over_bound"] <= 1
