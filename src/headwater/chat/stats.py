"""What a conversation holds, in numbers and as a one-line picture.

Knows how to lay a cache out in a line of characters. Does not know where the numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import UsageError

LEGEND = "# sinks   = pinned prompt   - window   . room"
"""What the characters of the picture mean."""

NARROWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The state of a chat after its last step.

    `pinned` counts the `sinks` too. Rates are those of the last answer: `tokens_per_s` without the time to its first
    token, which is `ttft_s`; None before the first. `notice` says what left the cache last, or that a conversation was
    started; `trouble` what of a session is not on the disk or what failed of memory, and why;
    `recalled` what memory brought with the last message. `fed` counts the tokens that were computed here, which what a
    snapshot brought was not; `answer_tokens` are those of the last answer.
    """

    seen: int
    held: int
    budget: int
    pinned: int
    turns: int
    evicted_turns: int
    evicted_tokens: int
    cache_bytes: int
    tokens_per_s: float | None
    ttft_s: float | None
    notice: str | None
    trouble: str | None = None
    recalled: tuple[str, ...] = ()
    fed: int = 0
    sinks: int = 0
    answer_tokens: int = 0


def picture(width: int, *, sinks: int, pinned: int, window: int, room: int) -> str:
    """The cache as one line of `width` characters, every part as wide as its share; none that exists is invisible.

    `pinned` is what is pinned beside the sinks. Raises UsageError for a width below 8.
    """
    if width < NARROWEST:
        raise UsageError(f"a picture of the cache needs a width of at least {NARROWEST}, got {width}")
    cells = _shares(width - 2, [sinks, pinned, window, room])
    return "[" + "".join(letter * count for letter, count in zip("#=-.", cells, strict=True)) + "]"


def _shares(cells: int, sizes: list[int]) -> list[int]:
    """Cells in proportion to the sizes, at least one for each that is not zero, `cells` in all."""
    total = sum(sizes) or 1
    exact = [size * cells / total for size in sizes]
    out = [max(int(share), 1 if size else 0) for share, size in zip(exact, sizes, strict=True)]
    while (short := cells - sum(out)) != 0:
        step = 1 if short > 0 else -1
        free = [index for index, count in enumerate(out) if count + step >= (1 if sizes[index] else 0) and sizes[index]]
        if not free:
            return [0, 0, 0, cells]
        index = max(free, key=lambda i: step * (exact[i] - out[i]))
        out[index] += step
    return out
