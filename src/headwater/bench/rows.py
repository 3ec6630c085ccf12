"""The rows of a comparison: which window each opens, and how it lets go of what is old.

Knows which policies there are and which numbers they take. Does not know conversations or how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.engines.base import Engine
from headwater.engines.snapshot import Held
from headwater.errors import BudgetError, HeadwaterError, UnknownName, UnsupportedCall, UsageError
from headwater.policies import POLICIES, has_sinks, policy, require

FULL = "full"
WHOLE_TURNS = "streaming-llm-turns"
DEFAULT_ROWS = (FULL, "sliding-window", "streaming-llm", WHOLE_TURNS)

_RULES = {
    FULL: "never evicts; goes on past the limit as the reference of the others",
    "sliding-window": "keeps the most recent tokens; one leaves for each that comes",
    "streaming-llm": "pins the sinks and the system prompt; of the rest, one token leaves for each that comes",
    WHOLE_TURNS: "the same pins; whole oldest turns leave when the next tokens would not fit, as in chat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One row, ready to run: `holds` is what its stream is opened with, None for one that never evicts; with
    `whole_turns` it evicts as `chat` does."""

    name: str
    rule: str
    holds: Held
    whole_turns: bool


def known_rows() -> tuple[str, ...]:
    """Every name a row can have: those of the policies, and streaming-llm with whole turns."""
    return (*POLICIES, WHOLE_TURNS)


def check_names(names: Sequence[str]) -> None:
    """Raises UnknownName for a row nobody knows, UsageError for none at all or for one that is given twice."""
    if not names:
        raise UsageError(f"no policy given; known: {', '.join(known_rows())}")
    for name in names:
        if name not in known_rows():
            raise UnknownName("policy", name, known_rows())
        if names.count(name) > 1:
            raise UsageError(f"policy {name!r} is given {names.count(name)} times; give it once")


def pinned(sinks: int, head_tokens: int) -> int:
    """Tokens that the rows with sinks never evict: the system prompt, or the sinks where those are more."""
    return max(sinks, head_tokens)


def plan(name: str, *, engine: Engine, budget: int, sinks: int, limit_tokens: int, head_tokens: int) -> Plan:
    """The row `name`, its numbers checked.

    The rows that evict by tokens let one leave for each that comes, the rule of the papers; whole turns keep the
    default block for an answer that outgrows the room. Raises BudgetError when the budget does not hold the pins,
    UnsupportedCall when the policy cannot run on this engine.
    """
    whole_turns = name == WHOLE_TURNS
    kind = "streaming-llm" if whole_turns else name
    if name == FULL:
        chosen, block = policy(FULL, budget=limit_tokens), None
    else:
        parameters = {"sinks": sinks} if has_sinks(kind) else {}
        chosen, block = policy(kind, budget=budget, **parameters), None if whole_turns else 1
    require(chosen, engine.supplies)
    holds = chosen.live(head_tokens, block)
    rule = _RULES.get(name, f"in every head, {chosen.summary}")
    return Plan(name=name, rule=rule, holds=holds, whole_turns=whole_turns)


def plans(
    names: Sequence[str], *, engine: Engine, budget: int, sinks: int, limit_tokens: int, head_tokens: int
) -> tuple[Plan, ...]:
    """Every row, each opened once to see that the engine can. Refuses before the first token, naming what works."""
    check_names(names)
    if isinstance(sinks, bool) or sinks < 0:
        raise BudgetError(f"sinks must be at least 0, got {sinks}")
    numbers = {"budget": budget, "sinks": sinks, "limit_tokens": limit_tokens, "head_tokens": head_tokens}
    made, refused = list[Plan](), dict[str, HeadwaterError]()
    for name in names:
        try:
            row = plan(name, engine=engine, **numbers)
            engine.open(row.holds).close()
            made.append(row)
        except HeadwaterError as error:
            refused[name] = error
    for name, error in refused.items():
        if isinstance(error, UsageError):
            raise error
        working = ", ".join(row.name for row in made) or "none"
        raise UnsupportedCall(
            f"policy {name} cannot run on {engine.name}: {error}; of the rows asked for, these can: {working}"
        )
    return tuple(made)
