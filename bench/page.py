"""Pages of `docs/` whose tables come from stored figures, between markers.

Knows Markdown. Does not know any figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def with_blocks(text: str, new: Mapping[str, str]) -> str:
    """The page with other text between its markers."""
    for name, block in new.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first are numbers."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *lines))
