"""What a replay found, in sentences, every figure from its results.

Knows what is worth saying. Does not know tables, pages or how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.bench.replay_results import FULL, ORACLE, RANDOM, ReplayResults, Row, by_layer
from headwater.bench.table import size

YARDSTICKS = (FULL, RANDOM, ORACLE)


def findings(results: ReplayResults) -> list[str]:
    """The sentences, most important first."""
    budgets = [budget for budget in results.settings.budgets if _rivals(results, budget)]
    if not budgets:
        return []
    shown = results.settings.shown_budget if results.settings.shown_budget in budgets else budgets[0]
    return [
        _order(results, shown),
        *_change(results, budgets),
        *_blind(results, shown),
        *_bounds(results, shown),
        *_recall(results, shown),
        *_heads(results, shown),
        *_same(results),
    ]


def _rivals(results: ReplayResults, budget: int) -> tuple[Row, ...]:
    """The policies at a budget without the yardsticks, the highest retained mass first."""
    return tuple(row for row in results.at(budget) if row.policy not in YARDSTICKS)


def _order(results: ReplayResults, budget: int) -> str:
    best, *others = _rivals(results, budget)
    text = (
        f"At a budget of {budget:,} of {results.trace.tokens:,} tokens {_and(_level(best, others))} "
        f"retain{'s' if len(_level(best, others)) == 1 else ''} {best.retained_attention_mass:.3f} of the attention"
    )
    others = [row for row in others if row.policy not in _level(best, others)]
    if others:
        text += ", " + ", ".join(f"{row.policy} {row.retained_attention_mass:.3f}" for row in others)
    return f"{text}."


def _level(best: Row, others: Sequence[Row]) -> list[str]:
    """The best and what equals it."""
    mass = best.retained_attention_mass
    return [best.policy, *(row.policy for row in others if row.retained_attention_mass == mass)]


def _change(results: ReplayResults, budgets: Sequence[int]) -> list[str]:
    """How the best does from the least to the largest budget, and whether it is the same one."""
    if len(budgets) < 2:
        return []
    low, high = budgets[0], budgets[-1]
    first, last = _rivals(results, low)[0], _rivals(results, high)[0]
    if first.policy == last.policy:
        return [
            f"{first.policy} leads at {low:,} tokens with {first.retained_attention_mass:.3f} and at {high:,} with "
            f"{last.retained_attention_mass:.3f}."
        ]
    return [
        f"The order depends on the budget: {first.policy} leads at {low:,} tokens "
        f"({first.retained_attention_mass:.3f}), {last.policy} at {high:,} ({last.retained_attention_mass:.3f})."
    ]


def _blind(results: ReplayResults, budget: int) -> list[str]:
    """The best without looking at attention against the best that looks, and what looking costs."""
    rivals = _rivals(results, budget)
    blind = next((row for row in rivals if not row.needs), None)
    seeing = next((row for row in rivals if row.needs), None)
    if blind is None or seeing is None:
        return []
    gap = seeing.retained_attention_mass - blind.retained_attention_mass
    return [
        f"Looking at the attention {'gains' if gap >= 0 else 'loses'} {abs(gap):.3f}: {seeing.policy} "
        f"{seeing.retained_attention_mass:.3f} against {blind.policy} {blind.retained_attention_mass:.3f}, for "
        f"{size(seeing.state_bytes)} of state in place of {size(blind.state_bytes)}."
    ]


def _bounds(results: ReplayResults, budget: int) -> list[str]:
    """How the policies lie between the floor and the bound."""
    rivals, said = _rivals(results, budget), list[str]()
    yardsticks = {row.policy: row.retained_attention_mass for row in results.at(budget) if row.policy in YARDSTICKS}
    if RANDOM in yardsticks:
        floor = yardsticks[RANDOM]
        below = [row.policy for row in rivals if row.retained_attention_mass <= floor]
        said.append(
            f"Evicting at random retains {floor:.3f}; "
            + (f"no more than that: {', '.join(below)}." if below else "every policy retains more.")
        )
    if ORACLE in yardsticks:
        bound, best = yardsticks[ORACLE], rivals[0]
        said.append(
            f"Knowing the attention to come, {budget:,} tokens in every head could retain {bound:.3f} and no more; "
            f"{best.policy} reaches {best.retained_attention_mass / bound:.1%} of that."
        )
    return said


def _recall(results: ReplayResults, budget: int) -> list[str]:
    """Where the heavy hitters name another winner than the mass."""
    rivals = _rivals(results, budget)
    best = max(rivals, key=lambda row: row.heavy_hitter_recall)
    if best.heavy_hitter_recall == rivals[0].heavy_hitter_recall:
        return []
    return [
        f"By heavy-hitter recall {best.policy} comes first with {best.heavy_hitter_recall:.3f}; {rivals[0].policy} has "
        f"{rivals[0].heavy_hitter_recall:.3f}."
    ]


def _heads(results: ReplayResults, budget: int) -> list[str]:
    """How unlike the heads and the layers are under the best policy."""
    trace, best = results.trace, _rivals(results, budget)[0]
    if len(trace.heads) < 2:
        return []
    mass, (low, high) = np.asarray(best.mass_by_head), best.spread()
    said = [
        f"Heads differ: under {best.policy} eight of ten lie between {low:.3f} and {high:.3f}; the worst is "
        f"{trace.head(int(mass.argmin()))} with {mass.min():.3f}."
    ]
    layers = by_layer(best, trace)
    if len(layers) > 1:
        worst, top = int(layers.argmin()), int(layers.argmax())
        said.append(
            f"Layer {trace.layers[worst]} loses most ({layers[worst]:.3f} retained), layer {trace.layers[top]} least "
            f"({layers[top]:.3f})."
        )
    return said


def _same(results: ReplayResults) -> list[str]:
    """Policies that did the same at every budget."""
    groups = dict[tuple[object, ...], list[str]]()
    for name, rows in results.lines().items():
        key = tuple(
            (row.budget, row.retained_attention_mass, row.heavy_hitter_recall, row.mass_by_head) for row in rows
        )
        groups.setdefault(key, []).append(name)
    return [f"{_and(names)} did the same at every budget." for names in groups.values() if len(names) > 1]


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
