"""What was said: passages of a conversation and whole documents, found again when they are asked for."""

from __future__ import annotations

from headwater.memory.base import Passage, Recalled, Remembers
from headwater.memory.memory import Memory

__all__ = ["Memory", "Passage", "Recalled", "Remembers"]
