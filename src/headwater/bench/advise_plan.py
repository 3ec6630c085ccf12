"""Which policies an advice replays, at which budgets and with which recent windows, and what each costs in bytes.

Knows what a budget must hold and what fits a memory. Does not know how anything is replayed, nor what is advised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headwater.bench.advise_results import CURVE, FIT, FULL, WINDOW, Asked
from headwater.bench.replay import state_bytes
from headwater.bench.table import size
from headwater.errors import BudgetError, UnsupportedCall, UsageError
from headwater.policies import POLICIES, Policy, StreamingLLM, policy
from headwater.policies.protection import WithRecentWindow
from headwater.traces import Trace

LEAST_BUDGET = 64
MOST_BUDGETS = 5
"""Budgets of the curve: so many powers of two, the largest that are at most half of the conversation."""
WINDOWS = (8, 32, 128, 512)
USUAL_WINDOW = 32
"""What policies protect without being asked; the other windows are tried beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy to replay, and what for. `recent_window` is what it always keeps of the newest, if it promises any."""

    policy: Policy[Any]
    role: str
    recent_window: int | None
    live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes of K and V that a token takes over all layers, and the trace whose heads each keep a state."""

    kv_bytes_per_token: int
    trace: Trace

    def cache(self, choice: Policy[Any]) -> int:
        """K and V of what the policy holds at most, each layer its own share; never more than the tokens there are."""
        layers = len(self.trace.layers)
        slots = sum(min(choice.at_layer(depth, layers).capacity, self.trace.tokens) for depth in range(layers))
        return -(-slots * self.kv_bytes_per_token // layers)

    def state(self, choice: Policy[Any]) -> int:
        """What the policy remembers beside them."""
        return state_bytes(choice, self.trace)

    def total(self, choice: Policy[Any]) -> int:
        """Both."""
        return self.cache(choice) + self.state(choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes policies for one conversation: `pins` are what streaming-llm holds for ever, `sinks` go to the others."""

    pins: int
    sinks: int | None
    seed: int

    def candidate(self, name: str, budget: int, role: str, recent_window: int | None = None) -> Candidate:
        """The policy of that name, ready to be replayed."""
        known = {field.name for field in fields(POLICIES[name])}
        numbers = {"sinks": self.sinks, "seed": self.seed, "recent_window": recent_window}
        taken = {key: value for key, value in numbers.items() if value is not None and key in known}
        made = policy(name, budget=budget, **taken)
        if isinstance(made, StreamingLLM):
            made = replace(made, sinks=self.pins)
        return Candidate(policy=made, role=role, recent_window=_recent(made), live=_runs_live(made))

    @property
    def least(self) -> int:
        """The smallest budget with room for what is pinned, the usual window, and something to choose from."""
        return max(LEAST_BUDGET, self.pins + USUAL_WINDOW + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is replayed in one reading; `choices` are those made for the user."""

    budgets: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    whole_fits: bool
    choices: tuple[str, ...]


def plan(maker: Maker, costs: Costs, asked: Asked) -> Plan:
    """Every policy at every budget of the curve; and at the budget or in the memory asked for, every recent window too.

    Raises UsageError for a conversation that every budget holds, BudgetError for a budget that is too small, that would
    evict nothing, or that does not fit the memory.
    """
    tokens, memory_bytes = costs.trace.tokens, asked.memory_bytes
    of_curve = budgets(maker, tokens, asked.budget)
    made, choices = for_curve(maker, of_curve, tokens), list[str]()
    whole_fits = memory_bytes is not None and costs.total(made[-1].policy) <= memory_bytes
    if asked.budget is not None:
        made += for_windows(maker, [each for each in made if each.policy.budget == asked.budget])
    elif memory_bytes is not None and not whole_fits:
        fitting, left_out = for_memory(maker, costs, memory_bytes)
        made += [*fitting, *for_windows(maker, fitting)]
        choices += [
            f"{name} is left out of the memory's budgets: with its state, not even {maker.least} tokens fit"
            for name in left_out
        ]
    return Plan(budgets=of_curve, candidates=tuple(made), whole_fits=whole_fits, choices=tuple(choices))


def budgets(maker: Maker, tokens: int, asked: int | None) -> tuple[int, ...]:
    """The budgets of the curve, ascending, the one that was asked for among them. Raises as `plan` does."""
    least = maker.least
    if tokens <= least:
        raise UsageError(
            f"the conversation has {tokens:,} tokens, and budgets are compared from {least} on, so nothing would ever "
            f"leave; take one of at least {least + 1} tokens"
        )
    if asked is not None and asked < least:
        raise BudgetError(
            f"budgets are compared from {least} tokens on: {maker.pins} pinned, a recent window of {USUAL_WINDOW}, and "
            f"something to choose from; got a budget of {asked}"
        )
    if asked is not None and asked >= tokens:
        raise BudgetError(
            f"a budget of {asked:,} holds the whole conversation of {tokens:,} tokens, so nothing would ever leave; "
            f"take a budget below that, or a longer conversation"
        )
    powers = [1 << power for power in range(tokens.bit_length())]
    chosen = [power for power in powers if least <= power <= tokens // 2][-MOST_BUDGETS:] or [least]
    return tuple(sorted({*chosen, *([] if asked is None else [asked])}))


def for_curve(maker: Maker, budgets: Sequence[int], tokens: int) -> list[Candidate]:
    """Every policy at every budget, the yardsticks among them."""
    names = [name for name in POLICIES if name != FULL]
    made = [maker.candidate(name, budget, CURVE) for budget in budgets for name in names]
    return [*made, maker.candidate(FULL, tokens, CURVE)]


def for_memory(maker: Maker, costs: Costs, memory_bytes: int) -> tuple[list[Candidate], list[str]]:
    """Every policy at the largest budget that fits the memory with its state; and the names of those that do not fit.

    Raises BudgetError when the memory does not hold the smallest budget of any.
    """
    made, left_out = list[Candidate](), list[str]()
    for name in POLICIES:
        if name == FULL:
            continue
        budget = _largest(maker, costs, name, memory_bytes)
        if budget is None:
            left_out.append(name)
        else:
            made.append(maker.candidate(name, budget, FIT))
    if not any(each.live for each in made):
        least = maker.candidate("sliding-window", maker.least, FIT).policy
        raise BudgetError(
            f"{size(memory_bytes)} do not hold the smallest budget that is compared, {maker.least} tokens: at "
            f"{costs.kv_bytes_per_token:,} bytes a token it takes {size(costs.total(least))}; give at least that"
        )
    return made, left_out


def for_windows(maker: Maker, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that have a recent window, at their budgets, with every other window that leaves a choice."""
    made = list[Candidate]()
    for each in candidates:
        if not isinstance(each.policy, WithRecentWindow):
            continue
        room = each.policy.budget - (maker.sinks or 0)
        made += [
            maker.candidate(each.policy.name, each.policy.budget, WINDOW, window)
            for window in WINDOWS
            if window < room and window != each.recent_window
        ]
    return made


def _largest(maker: Maker, costs: Costs, name: str, memory_bytes: int) -> int | None:
    """The largest budget whose total fits; costs grow with the budget, so halving finds it."""
    low, high = maker.least - 1, costs.trace.tokens - 1
    while low < high:
        middle = (low + high + 1) // 2
        if costs.total(maker.candidate(name, middle, FIT).policy) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low if low >= maker.least else None


def _recent(made: Policy[Any]) -> int | None:
    if isinstance(made, WithRecentWindow):
        return made.recent_window
    live = made.window(block=1) if _runs_live(made) else None
    return None if live is None else live.recent


def _runs_live(made: Policy[Any]) -> bool:
    """Whether a window of the stream does the same; `full` needs none, but is no policy that goes on."""
    try:
        return made.name != FULL and made.window(block=1) is not None
    except UnsupportedCall:
        return False
