"""How an advice follows from what was measured.

Knows how a curve bends and which row is the better one. Does not know traces, engines or words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.bench.advise_results import (
    BY_BEND,
    BY_BUDGET,
    BY_LARGEST,
    BY_MEMORY,
    CURVE,
    FIT,
    FULL,
    RANDOM,
    WINDOW,
    Advice,
    Asked,
    Bend,
    Point,
    Row,
)

LEAST_BEND = 0.01
"""How far above its chord a curve has to lie to have a bend, in mass."""


NEGLIGIBLE = 0.001
"""Mass that is not worth a byte: within so much of the best, the cheapest is advised."""


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The highest retained mass first; of equals, the higher recall, then the fewer bytes."""
    return sorted(rows, key=lambda row: (-row.retained_attention_mass, -row.heavy_hitter_recall, row.total_bytes))


def rivals(rows: Sequence[Row]) -> list[Row]:
    """The rows of policies that one could take: all but the yardsticks."""
    return [row for row in rows if row.policy not in (FULL, RANDOM)]


def curve(rows: Sequence[Row]) -> tuple[Point, ...]:
    """What the best policy retains at each budget of the curve, and after them everything."""
    of_curve = [row for row in rows if row.role == CURVE]
    best = [
        ranked(rivals([row for row in of_curve if row.budget == budget]))[0]
        for budget in sorted({row.budget for row in rivals(of_curve)})
    ]
    whole = next(row for row in of_curve if row.policy == FULL)
    return tuple(
        Point(budget=row.budget, policy=row.policy, mass=row.retained_attention_mass) for row in (*best, whole)
    )


def bend(points: Sequence[Point]) -> Bend | None:
    """Where the curve bends: the point farthest above its chord, or None where that is not `LEAST_BEND`.

    The chord is the straight line from the smallest budget to the whole conversation, over the logarithm of the budget:
    if every doubling of the budget bought the same, the curve would lie on it. Just before the bend it buys more than
    that, just after it less (V. Satopää, J. Albrecht, D. Irwin, B. Raghavan, "Finding a 'Kneedle' in a Haystack", ICDCS
    Workshops 2011). Of equally far points the smallest budget counts. It depends on both ends of the chord.
    """
    if len(points) < 3:
        return None
    doublings, mass = np.log2([point.budget for point in points]), np.array([point.mass for point in points])
    above = mass - np.interp(doublings, doublings[[0, -1]], mass[[0, -1]])
    far = int(above.argmax())
    return Bend(budget=points[far].budget, above=float(above[far])) if above[far] >= LEAST_BEND else None


def decided(rows: Sequence[Row], asked: Asked, *, whole_fits: bool) -> tuple[str, int | None]:
    """What decides the budget, and the budget; None where every policy has its own that fills the memory.

    A memory that holds the whole conversation decides nothing.
    """
    if asked.budget is not None:
        return BY_BUDGET, asked.budget
    if asked.memory_bytes is not None and not whole_fits:
        return BY_MEMORY, None
    points = curve(rows)
    found = bend(points)
    return (BY_LARGEST, points[-2].budget) if found is None else (BY_BEND, found.budget)


def here(rows: Sequence[Row], by: str, budget: int | None) -> list[Row]:
    """The rows of the decided budget, or of the memory, other recent windows among them, the best first."""
    roles = (FIT, WINDOW) if by == BY_MEMORY else (CURVE, WINDOW)
    return ranked([row for row in rows if row.role in roles and budget in (None, row.budget)])


def _cheapest(able: Sequence[Row], by: str) -> Row:
    """What takes the fewest bytes of those that keep as good as most; in a memory, which all fill, what keeps most."""
    if by == BY_MEMORY:
        return able[0]
    enough = able[0].retained_attention_mass - NEGLIGIBLE
    return min((row for row in able if row.retained_attention_mass >= enough), key=lambda row: row.total_bytes)


def advise(rows: Sequence[Row], asked: Asked, *, whole_fits: bool) -> Advice:
    """The advice at the budget that was decided."""
    by, budget = decided(rows, asked, whole_fits=whole_fits)
    found, points = here(rows, by, budget), curve(rows)
    able = rivals(found)
    return Advice(
        by=by,
        budget=budget,
        best=_cheapest(able, by),
        live=_cheapest([row for row in able if row.live], by),
        most=able[0],
        floor=next(row for row in found if row.policy == RANDOM),
        curve=points,
        bend=bend(points),
    )
