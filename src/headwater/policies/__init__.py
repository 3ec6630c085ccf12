"""Pure rules: which positions go.

`POLICIES` names them; `policy` makes one from a name and parameters. Nothing here knows a model or a tensor.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headwater.errors import UnknownName, UnsupportedCall, UsageError
from headwater.policies.base import Policy, Slots
from headwater.policies.full import Full
from headwater.policies.h2o import H2O
from headwater.policies.incremental import Incremental
from headwater.policies.pyramidkv import PyramidKV
from headwater.policies.scissorhands import Scissorhands
from headwater.policies.sliding_window import SlidingWindow
from headwater.policies.snapkv import SnapKV
from headwater.policies.streaming_llm import StreamingLLM
from headwater.policies.tova import Tova
from headwater.policies.uniform import Random
from headwater.policies.window import Window

POLICIES: dict[str, type[Policy[Any]]] = {
    "full": Full,
    "random": Random,
    "sliding-window": SlidingWindow,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "tova": Tova,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
}


def policy(choice: str | Policy[Any], **parameters: Any) -> Policy[Any]:
    """The policy of that name with these parameters; an instance is handed back as it is.

    Raises UnknownName for a name nobody knows, UsageError for a parameter the policy does not have, BudgetError for a
    value it refuses.
    """
    if isinstance(choice, Policy):
        if parameters:
            raise UsageError(f"{choice.name} is made already, so it takes no parameters; got {', '.join(parameters)}")
        return choice
    if choice not in POLICIES:
        raise UnknownName("policy", choice, POLICIES)
    allowed = [field.name for field in fields(POLICIES[choice])]
    for name in parameters:
        if name not in allowed:
            raise UsageError(f"{choice} has no parameter {name!r}; allowed: {', '.join(allowed)}")
    return POLICIES[choice](**parameters)


def has_sinks(name: str) -> bool:
    """Whether a policy of the registry takes `sinks`."""
    return any(field.name == "sinks" for field in fields(POLICIES[name]))


def require(choice: Policy[Any], supplies: frozenset[str]) -> None:
    """Raises UnsupportedCall when the policy needs what an engine that supplies this much does not give."""
    missing = choice.needs - supplies
    if missing:
        able = sorted(
            name for name, kind in POLICIES.items() if kind().needs <= supplies and (kind.windowed or supplies)
        )
        raise UnsupportedCall(
            f"{choice.name} needs {', '.join(sorted(missing))}, which this engine does not supply; "
            f"these would work: {', '.join(able)}"
        )


def table() -> str:
    """The registry as a Markdown table, every policy at its default parameters."""
    lines = [
        "| policy | keeps | needs | state, bytes per slot | source |",
        "|---|---|---|---:|---|",
    ]
    for name, kind in POLICIES.items():
        made = kind()
        needs = ", ".join(sorted(made.needs)) or "nothing"
        lines.append(f"| `{name}` | {made.summary} | {needs} | {made.state_bytes_per_slot} | {made.source} |")
    return "\n".join(lines)


__all__ = [
    "H2O",
    "POLICIES",
    "Full",
    "Incremental",
    "Policy",
    "PyramidKV",
    "Random",
    "Scissorhands",
    "SlidingWindow",
    "Slots",
    "SnapKV",
    "StreamingLLM",
    "Tova",
    "Window",
    "has_sinks",
    "policy",
    "require",
    "table",
]
