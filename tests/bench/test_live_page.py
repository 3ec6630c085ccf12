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
