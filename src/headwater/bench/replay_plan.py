"""Which policies are replayed at which budgets, made ready with the numbers that were given.

Knows the names of the command, `all` and `oracle` among them. Does not know traces or figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from headwater.bench.replay_results import FULL, ORACLE, RANDOM
from headwater.errors import BudgetError, MissingExtra, UnknownName, UsageError
from headwater.policies import POLICIES, Policy, policy

ALL = "all"
DEFAULT_POLICIES = (ALL, RANDOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is replayed: the policies, ready made, and the budgets at which the offline bound is sought."""

    policies: tuple[Policy[Any], ...]
    oracle_budgets: tuple[int, ...]
    choices: tuple[str, ...]


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """The names with `all` written out: every policy of the registry but the two yardsticks, full and random.

    Raises UnknownName for a policy nobody knows, UsageError for none at all or for one that is named twice.
    """
    every = tuple(name for name in POLICIES if name not in (FULL, RANDOM))
    known = (*POLICIES, ORACLE)
    expanded = tuple(each for name in names for each in (every if name == ALL else (name,)))
    if not expanded:
        raise UsageError(f"no policy given; known: {', '.join(known)}")
    for name in expanded:
        if name not in known:
            raise UnknownName("policy", name, known, also=f"{ALL} ({', '.join(every)})")
        if expanded.count(name) > 1:
            raise UsageError(f"policy {name!r} is given {expanded.count(name)} times; give it once")
    return expanded


def plan(names: Sequence[str], *, budgets: Sequence[int], tokens: int, parameters: Mapping[str, int | None]) -> Plan:
    """Every policy at every budget, made with those of the parameters that were given and that it has.

    Raises UsageError when none of the policies has a parameter that was given, BudgetError for a budget that evicts
    nothing in so many tokens or that a policy refuses, MissingExtra for the oracle without numba.
    """
    if ORACLE in names and find_spec("numba") is None:
        raise MissingExtra("numba", "lab")
    _check_budgets(budgets, tokens)
    taken, choices = _handed_out(names, parameters)
    if FULL in names:
        choices.append(f"full keeps all {tokens:,} tokens, whatever the budgets")
    ascending = tuple(sorted(budgets))
    made = [
        policy(name, budget=budget, **taken[name])
        for name in names
        if name != ORACLE
        for budget in ((tokens,) if name == FULL else ascending)
    ]
    return Plan(policies=tuple(made), oracle_budgets=ascending if ORACLE in names else (), choices=tuple(choices))


def _check_budgets(budgets: Sequence[int], tokens: int) -> None:
    if len(set(budgets)) != len(budgets):
        raise UsageError(f"budgets: a number is given twice in {', '.join(map(str, budgets))}")
    for budget in budgets:
        if budget >= tokens:
            raise BudgetError(
                f"a budget of {budget} is not below the {tokens} tokens of the trace, so nothing would ever be "
                f"evicted; take budgets below {tokens}, or a longer trace"
            )


def _handed_out(
    names: Sequence[str], parameters: Mapping[str, int | None]
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """What each policy takes of the parameters that were given, and in words, to whom each did not go."""
    taken, choices = {name: dict[str, int]() for name in names}, list[str]()
    for parameter, value in parameters.items():
        if value is None:
            continue
        owners = [name for name, kind in POLICIES.items() if parameter in {field.name for field in fields(kind)}]
        able, others = [name for name in names if name in owners], [name for name in names if name not in owners]
        if not able:
            raise UsageError(
                f"none of {', '.join(names)} has the parameter {parameter!r}; these have it: {', '.join(owners)}"
            )
        for name in able:
            taken[name][parameter] = value
        if others:
            choices.append(f"{parameter} {value} goes to {', '.join(able)}, not to {', '.join(others)}")
    return taken, choices
