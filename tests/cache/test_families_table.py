"""The page of model families says what attaching a cache to each of them does."""

from tests.families_table import PAGE, page_with, table


def test_the_page_is_what_the_families_do() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with(table(), page), "run: python -m tests.families_table"
