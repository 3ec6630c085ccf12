"""Headwater keeps a language model's conversation going for ever in a fixed amount of KV cache.

Importing this package imports nothing heavy: every public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError, MissingExtra

if TYPE_CHECKING:
    from headwater.cache.adapter import WindowCache
    from headwater.cache.policy_cache import attach
    from headwater.cache.textbook import saved_fraction, sliding_window
    from headwater.chat import Chat, Sampling
    from headwater.engines import open_engine
    from headwater.engines.fake import FakeEngine
    from headwater.memory import Memory
    from headwater.policies import POLICIES, policy
    from headwater.policies.window import Window
    from headwater.traces import canonical_trace, replay

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Chat",
    "FakeEngine",
    "HeadwaterError",
    "Memory",
    "Sampling",
    "Window",
    "WindowCache",
    "__version__",
    "attach",
    "canonical_trace",
    "open_engine",
    "policy",
    "replay",
    "saved_fraction",
    "sliding_window",
]

_HOMES = {
    "POLICIES": "headwater.policies",
    "Chat": "headwater.chat",
    "FakeEngine": "headwater.engines.fake",
    "Memory": "headwater.memory",
    "Sampling": "headwater.chat",
    "Window": "headwater.policies.window",
    "WindowCache": "headwater.cache.adapter",
    "attach": "headwater.cache.policy_cache",
    "canonical_trace": "headwater.traces",
    "open_engine": "headwater.engines",
    "policy": "headwater.policies",
    "replay": "headwater.traces",
    "saved_fraction": "headwater.cache.textbook",
    "sliding_window": "headwater.cache.textbook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers"):
            raise MissingExtra(error.name, "transformers") from error
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
