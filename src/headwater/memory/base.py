"""The seam between a chat and what remembers for it.

Knows what is remembered and what is asked. Does not know how anything is found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text that can be brought back: a message with its answer, or a piece of a document.

    `key` names it once and for all. `number` counts the exchanges of `conversation`, or the pieces of the document
    `source` (empty for what was said), from 1. `when` is the time of day it was said, or empty.
    """

    key: str
    conversation: str
    number: int
    text: str
    when: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A passage that was found; a higher score is a better one, and scores of two questions do not compare."""

    passage: Passage
    score: float


class Remembers(Protocol):
    """What a chat needs of a memory; any object with these two methods will do."""

    def remember(self, passages: Sequence[Passage]) -> None:
        """Keep the passages, in order; one whose key is known stays as it is. All are kept, or none."""
        ...

    def recall(self, text: str, *, conversation: str, limit: int = 5, skip: Collection[str] = ()) -> list[Recalled]:
        """What was said in the conversation, or stands in a document, that has to do with the text; best first.

        `skip` holds the keys of passages that are not wanted.
        """
        ...
