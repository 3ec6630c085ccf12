"""Which policies keep a fact inside a long prompt, and can still say it.

A sentence with a number is put at some depth of a text of `PROMPT` tokens, the policy holds a quarter of that, and the
end of the prompt begins the same sentence again. What is measured is told by a cache that keeps everything, too: the
share of heads that still hold the number's tokens, and the probability of the number (nats a token), after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.live_quality import POLICIES, made
from headwater.engines.base import Engine, Stream
from headwater.engines.torch_streams import PolicyStream

BOOK = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
PROMPT, SHARE = 512, 4
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLES = (("the lighthouse keeper", "7412"), ("the harbour master", "3958"), ("the old carpenter", "6027"))
STARTS = (10_000, 40_000, 70_000)
"""Where in the book the text of each needle begins, in letters."""


def measure(engine: Engine) -> dict[str, Any]:
    """By policy, a figure for each depth, mean over the needles."""
    found: dict[str, Any] = {}
    for name in ("full", *POLICIES):
        kept, nats, right = (np.zeros(len(DEPTHS)) for _ in range(3))
        for column, depth in enumerate(DEPTHS):
            for needle, start in zip(NEEDLES, STARTS, strict=True):
                prompt, place, answer = _prompt(engine, needle, start, depth)
                holds = None if name == "full" else made(name, PROMPT // SHARE).live()
                stream = engine.open(holds, limit_tokens=2 * PROMPT if holds is None else None)
                logits = stream.feed(prompt)
                kept[column] += _share_held(stream, place) / len(NEEDLES)
                likely, said = _answered(stream, logits, answer)
                nats[column] += likely / len(NEEDLES)
                right[column] += said / len(NEEDLES)
                stream.close()
        found[name] = {
            "held": [round(each, 4) for each in kept],
            "nats": [round(each, 4) for each in nats],
            "said": [round(each, 4) for each in right],
        }
        print(name, found[name], flush=True)
    says = {"prompt": PROMPT, "budget": PROMPT // SHARE, "depths": list(DEPTHS), "needles": len(NEEDLES)}
    return {"needle": found, "needle_says": says}


def _prompt(engine: Engine, needle: tuple[str, str], start: int, depth: float) -> tuple[list[int], range, list[int]]:
    """The prompt, where the number's tokens lie in it, and the number's tokens."""
    who, number = needle
    fact, again = f"\n\nThe secret number of {who} is", f"\n\nThe secret number of {who} is"
    answer, ending = engine.encode(f" {number}"), engine.encode(again)
    said = [*engine.encode(fact), *answer, *engine.encode(".\n\n")]
    wanted = PROMPT - len(said) - len(ending)
    text = engine.encode(BOOK.read_text(encoding="utf-8")[start : start + 8 * PROMPT])[:wanted]
    if len(text) < wanted:
        raise SystemExit(f"the book has {len(text)} tokens after letter {start:,}, {wanted} are needed")
    at = int(depth * len(text))
    first = at + len(said) - len(engine.encode(".\n\n")) - len(answer)
    return [*text[:at], *said, *text[at:], *ending], range(first, first + len(answer)), answer


def _share_held(stream: Stream, place: range) -> float:
    """How much of these positions is held, mean over the heads."""
    if isinstance(stream, PolicyStream):
        rows: Sequence[Any] = [row for positions in stream.kept_by_layer().values() for row in positions]
    else:
        rows = [stream.kept]
    return float(np.mean([np.isin(np.arange(place.start, place.stop), row).mean() for row in rows]))


def _answered(stream: Stream, logits: NDArray[np.float32], answer: list[int]) -> tuple[float, bool]:
    """The mean log-probability of the answer's tokens, and whether each is the likeliest."""
    total, said = 0.0, True
    for token in answer:
        shifted = logits.astype(np.float64) - logits.max()
        total += float(shifted[token] - np.log(np.exp(shifted).sum()))
        said = said and int(np.argmax(logits)) == token
        logits = stream.feed([token])
    return total / len(answer), said
