"""The advice in words, every figure from the stored results.

Knows what is worth saying and in which order. Does not know pages or terminals.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from headwater.bench.advise_choice import here, rivals
from headwater.bench.advise_results import BY_LARGEST, BY_MEMORY, AdviseResults, Row, Subject
from headwater.bench.table import size

PINNING, WINDOW = "streaming-llm", "recent_window"


def header(subject: Subject) -> str:
    """What is about to run, and every choice made for the user."""
    asked, source = subject.asked, subject.conversation
    lines = [
        f"Model:        {subject.model} ({subject.engine}), trained length {subject.context_length:,} tokens, "
        f"{subject.layers} layers with {subject.heads} heads in all",
        f"Conversation: {source.name}, {source.turns} turns, {source.tokens:,} tokens with the chat template",
        f"Cache:        {subject.kv_bytes_per_token:,} bytes of keys and values for each token",
        f"Budgets:      {_list(subject.budgets)} tokens; seed {asked.seed}",
        f"Pinned:       {subject.pinned_tokens} tokens by {PINNING}, as in chat (system prompt {subject.head_tokens})",
        *(f"Choice:       {choice}" for choice in subject.choices),
    ]
    return "\n".join(lines)


def paragraphs(results: AdviseResults) -> list[str]:
    """The advice: what to take and what it costs, and what of it runs live today."""
    return [" ".join(said) for said in (_fits(results), _best(results), _live(results)) if said]


def command(results: AdviseResults) -> str:
    """The command that chats with the best policy that runs live today."""
    subject, live = results.subject, results.advice.live
    engine = [] if subject.engine == "transformers" else ["--engine", subject.engine]
    sinks = ["--sinks", str(subject.asked.sinks)] if live.policy == PINNING and subject.asked.sinks is not None else []
    words = ["headwater", "chat", "--model", subject.model, *engine, "--policy", live.policy]
    return shlex.join([*words, "--budget", str(live.budget), *sinks])


def _fits(results: AdviseResults) -> list[str]:
    subject, memory = results.subject, results.subject.asked.memory_bytes
    if not subject.whole_fits or memory is None:
        return []
    room = min(memory // subject.kv_bytes_per_token, subject.context_length)
    end = "the trained length ends" if room == subject.context_length else "the memory is full"
    return [
        f"All of it fits: the {subject.used_tokens:,} tokens take {size(results.full.cache_bytes)} of {size(memory)}, "
        f"and {end} only after {room:,}.",
        "Nothing has to leave this conversation; for a longer one, or for less memory, what follows holds.",
    ]


def _best(results: AdviseResults) -> list[str]:
    best, floor = results.advice.best, results.advice.floor
    window = f" and a recent window of {best.recent_window}" if WINDOW in best.parameters else ""
    return [
        f"Take {best.policy} with a budget of {best.budget:,} tokens{window}.",
        f"On this conversation it keeps {_share(best)}; a random choice keeps "
        f"{_percent(floor.retained_attention_mass)} and {_percent(floor.heavy_hitter_recall)}.",
        f"It costs {size(best.total_bytes)}, {size(best.cache_bytes)} of it keys and values and "
        f"{size(best.state_bytes)} what the policy remembers; keeping the whole conversation costs "
        f"{size(results.full.total_bytes)}.",
        *_more(results),
        *_budget(results),
        *_bend(results),
        *_recent(results),
    ]


def _more(results: AdviseResults) -> list[str]:
    """What keeps more, and why it is not advised."""
    best, most = results.advice.best, results.advice.most
    if most.policy == best.policy:
        return []
    return [f"{most.policy} keeps {_percent(most.retained_attention_mass)}, hardly more, for {size(most.total_bytes)}."]


def _budget(results: AdviseResults) -> list[str]:
    """What decided the budget, unless it was the bend."""
    advice, asked = results.advice, results.subject.asked
    if advice.by == BY_MEMORY:
        held = sorted(rivals(here(results.rows, advice.by, None)), key=lambda row: row.budget)
        return [
            f"That fills the {size(asked.memory_bytes or 0)}: beside what a policy remembers there is room for "
            f"{held[0].budget:,} tokens ({held[0].policy}) to {held[-1].budget:,} ({held[-1].policy})."
        ]
    if advice.by == BY_LARGEST:
        return ["The curve of retained mass has no bend, so the largest budget compared is taken."]
    return []


def _bend(results: AdviseResults) -> list[str]:
    """Where the curve bends, and what one step less and one more would buy."""
    advice = results.advice
    if advice.bend is None:
        return [] if advice.by == BY_LARGEST else ["The curve of retained mass has no bend."]
    points = advice.curve
    place = next(index for index, point in enumerate(points) if point.budget == advice.bend.budget)
    before, there, after = points[place - 1 : place + 2]
    chosen = "There the curve bends" if advice.budget == there.budget else f"The curve bends at {there.budget:,} tokens"
    return [
        f"{chosen}: the best policy keeps {_percent(before.mass)} in {before.budget:,} tokens, "
        f"{_percent(there.mass)} in {there.budget:,}, and {_percent(after.mass)} in {after.budget:,}."
    ]


def _recent(results: AdviseResults) -> list[str]:
    """What the recent window changes, for the policies where it can be set."""
    advice, best = results.advice, results.advice.best
    tried = [row for row in here(results.rows, advice.by, advice.budget) if WINDOW in row.parameters]
    own = [row for row in tried if row.policy == best.policy]
    if own:
        return [
            f"Of the {len(own)} recent windows tried, {own[0].recent_window} keeps most; with {own[-1].recent_window} "
            f"it is {_percent(own[-1].retained_attention_mass)}."
        ]
    return [
        f"{best.policy} has no recent window to set; of the policies that have one, {row.policy} keeps most, "
        f"{_percent(row.retained_attention_mass)} with {row.recent_window}."
        for row in tried[:1]
    ]


def _live(results: AdviseResults) -> list[str]:
    """What can be had of this today."""
    best, live, pins = results.advice.best, results.advice.live, results.subject.pinned_tokens
    if best.policy == live.policy:
        return [f"{best.policy} runs live today:"]
    kept = f"keeps the {live.recent_window:,} most recent" if live.recent_window is not None else live.policy
    return [
        f"So far {best.policy} can only be replayed: no live cache evicts by attention yet.",
        f"Of what runs live today, take {live.policy} with {live.budget:,} tokens: it "
        + (f"pins the first {pins} and {kept}" if live.policy == PINNING else kept)
        + f". It keeps {_share(live)}, for {size(live.total_bytes)}:",
    ]


def _share(row: Row) -> str:
    return (
        f"{_percent(row.retained_attention_mass)} of the attention and {_percent(row.heavy_hitter_recall)} of each "
        "step's 32 largest weights"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _list(values: Sequence[int]) -> str:
    *most, last = (f"{value:,}" for value in values)
    return f"{', '.join(most)} and {last}" if most else last
