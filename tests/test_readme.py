"""What the README says is so: the table is the registry's, the snippets run, the links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.readme import STORED, block, with_block
from headwater.bench.results import read
from headwater.policies import table

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_policies_is_the_registry() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- policies -->") == text.count("<!-- /policies -->") == 1
    between = text.partition("<!-- policies -->")[2].partition("<!-- /policies -->")[0]
    assert between.strip() == table(), "paste what headwater.policies.table() returns between the markers"


def test_the_comparison_is_the_stored_one() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_block(text, block(read(STORED))), "run: make demo, then python -m bench.readme"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.real_model
def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, in one namespace, as a reader would paste them."""
    namespace: dict[str, Any] = {}
    for snippet in snippets():
        exec(compile(snippet, str(README), "exec"), namespace)
    assert len(snippets()) == 2
    assert namespace["cache"].held <= 64 < namespace["cache"].seen
    assert "68.0% saved" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in README.parent.glob("docs/*.md"))])
def test_every_link_leads_somewhere(name: str) -> None:
    page = README.parent / name
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{name} links to {link}"


def rows_of_failures() -> list[list[str]]:
    """The cells of every row of every table of the page."""
    page = (README.parent / "docs" / "failures.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if cells[0].strip() not in ("kind", "given")]


def test_every_kind_of_failure_has_a_test_that_exists() -> None:
    rows, defined = rows_of_failures(), dict[str, set[str]]()
    assert len({cells[0] for cells in rows}) == len(rows) == 32 + 11, "a row has gone, or is there twice"
    for cells in rows:
        named = re.findall(r"`([^`:]+)::(\w+)`", cells[-1])
        assert named, f"{cells[0]} names no test"
        assert cells[-1] == ", ".join(f"`{file}::{test}`" for file, test in named)
        for file, test in named:
            if file not in defined:
                text = (README.parent / file).read_text(encoding="utf-8")
                defined[file] = set(re.findall(r"^def (test_\w+)\(", text, flags=re.MULTILINE))
            assert test in defined[file], f"{cells[0]}: {file} has no {test}"
