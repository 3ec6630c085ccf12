"""The table of model families in `docs/families.md`, made by attaching a cache to each of them.

`python -m tests.families_table` writes it; `tests/cache/test_families_table.py` holds the page to it.
"""

from __future__ import annotations

from pathlib import Path

from headwater.cache.adapter import RingLayer, WindowCache
from headwater.errors import UnsupportedModel
from headwater.rotary import Rotation
from tests import tiny

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
START, END = "<!-- families -->", "<!-- /families -->"


def row(name: str) -> str:
    """One line of the table: what the family is, what the probe measured, and the verdict."""
    family = tiny.FAMILIES[name]
    model = tiny.build(name)
    attention = ", ".join(family.attention)
    try:
        cache = WindowCache(model, 20)
    except UnsupportedModel as error:
        return f"| {name} | {family.note} | | {attention} | refused: {error} |"
    own = sum(isinstance(layer, RingLayer) for layer in cache.layers)
    found = dict.fromkeys(_words(shape.rotation, shape.key_dim) for shape in cache.ring.shapes)
    layers = (
        "all layers" if own == len(cache.layers) else f"{own} of {len(cache.layers)} layers, the rest keep their own"
    )
    return f"| {name} | {family.note} | {'; '.join(found)} | {attention} | right: {layers} |"


def _words(rotation: Rotation | None, head_dim: int) -> str:
    if rotation is None:
        return "no rotation"
    part = "" if 2 * rotation.pairs == head_dim else f", {2 * rotation.pairs} of {head_dim} dimensions"
    return f"{rotation.layout}{part}"


def table() -> str:
    head = ["| family | positions | measured at attach | attention | verdict |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(row(name) for name in tiny.FAMILIES)])


def page_with(new: str, page: str) -> str:
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{new}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
