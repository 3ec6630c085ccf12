"""The example of docs/adding-a-policy.md runs, gives what it says, and obeys the laws."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.policies import Policy, policy
from tests.policies.test_laws import draw_policy, keeps_the_laws, run

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-policy.md"
NAME = "headwater_docs_example"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The code blocks of the page, run in one module, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    module = sys.modules[NAME] = ModuleType(NAME)
    module.__dict__["print"] = module.__dict__.setdefault("printed", []).append
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), module.__dict__)
    yield module
    del sys.modules[NAME]


def test_it_gives_what_the_page_says(example: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    victims = re.findall(r"^print\(.*\)  # (\[.*?\])", page, re.MULTILINE)
    (table,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [str(value) for value in example.printed] == [*victims, *table.splitlines()]
    assert victims == ["[2]"]


def test_it_can_be_given_where_a_name_can(example: ModuleType) -> None:
    made = policy(example.HighestPeak(budget=64, recent_window=8))
    assert made.needs == {"attention"}
    assert made.state_bytes_per_slot == 13


def test_its_refusal_names_policy_parameter_and_value(example: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"^highest-peak: recent_window must .* got recent_window=8;"):
        example.HighestPeak(budget=8, recent_window=8)


@given(data=st.data())
def test_it_obeys_the_laws(example: ModuleType, data: st.DataObject) -> None:
    kind: type[Policy[Any]] = example.HighestPeak
    for eviction in run(data, draw_policy(data, kind)):
        keeps_the_laws(eviction)
