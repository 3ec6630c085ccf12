"""What the README says about the policies is what the registry says."""

from __future__ import annotations

from pathlib import Path

from headwater.policies import table

README = Path(__file__).parents[1] / "README.md"


def test_the_table_of_policies_is_the_registry() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- policies -->") == text.count("<!-- /policies -->") == 1
    between = text.partition("<!-- policies -->")[2].partition("<!-- /policies -->")[0]
    assert between.strip() == table(), "paste what headwater.policies.table() returns between the markers"
