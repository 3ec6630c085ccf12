"""How far back a chat still answers: the recall horizon, measured for `bench/memory.py`.

A dialogue is told to the model as it was said. At some distances after a booking's reference was given, measured in
tokens, the model is asked for it, answers greedily, and the conversation is put back to where it was. Right is an
answer that holds the reference, letter by letter. At distance 0 the fact is still in the window: no way of remembering
can do better, so that is the ceiling.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.chat.conversation import Conversation
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine

BUDGET, ALLOWANCE, LONGEST_ANSWER = 512, 256, 24
DISTANCES = (0, 1024, 4096)
WAYS: dict[str, dict[str, Any]] = {
    "window": {"policy": "sliding-window"},
    "sinks and window": {"policy": "streaming-llm"},
    "with memory": {"policy": "streaming-llm", "memory": True, "memory_tokens": ALLOWANCE},
}


@dataclass(slots=True)
class Tally:
    """Questions asked at a distance, right answers, and those whose evidence memory brought."""

    asked: int = 0
    right: int = 0
    brought: int = 0
    answers: list[str] = field(default_factory=list)


def measure(engine: Engine, items: Sequence[dict[str, Any]], sessions: dict[str, Any]) -> dict[str, Any]:
    """Shares by way and distance."""
    tallies = {way: {distance: Tally() for distance in DISTANCES} for way in WAYS}
    for name in sorted({item["session_id"] for item in items}):
        asked = [item for item in items if item["session_id"] == name]
        for way, options in WAYS.items():
            _run(engine, sessions[name]["turns"], asked, options, tallies[way])
    return {
        "recall_horizon": {
            way: {
                str(distance): {
                    "questions": tally.asked,
                    "right": tally.right / tally.asked if tally.asked else None,
                    "brought": tally.brought / tally.asked if tally.asked and "memory" in WAYS[way] else None,
                    "answers": tally.answers[:3],
                }
                for distance, tally in each.items()
            }
            for way, each in tallies.items()
        },
        "recall_horizon_says": f"{len(items)} of the booking questions, budget {BUDGET}, memory may take {ALLOWANCE} "
        f"of it, answers of up to {LONGEST_ANSWER} tokens, greedy; right is an answer that holds the reference; "
        "summaries do not exist yet and are not measured",
    }


def _run(
    engine: Engine,
    turns: Sequence[dict[str, Any]],
    items: Sequence[dict[str, Any]],
    options: dict[str, Any],
    tally: dict[int, Tally],
) -> None:
    """Tell one dialogue, asking on the way."""
    greedy = Sampling(temperature=0, repetition_penalty=1)
    chat = Chat.open(engine, budget=BUDGET, sampling=greedy, max_tokens=LONGEST_ANSWER, **options)
    said_at: dict[int, int] = {}
    left = {(index, distance) for index in range(len(items)) for distance in DISTANCES}
    for place in range(0, len(turns) - 1, 2):
        _tell(chat, turns[place]["text"], turns[place + 1]["text"])
        now = len(chat._talk.ledger)
        for index, item in enumerate(items):
            if item["evidence_turns"][0] in (place, place + 1):
                said_at[index] = now
        due = [(i, d) for i, d in sorted(left) if i in said_at and now - said_at[i] >= d]
        left -= set(due)
        for index, distance in due:
            _ask(chat, items[index], tally[distance])
    chat.close()


def _tell(chat: Chat, question: str, answer: str) -> None:
    """An exchange as it was said, fed as a chat feeds it."""
    talk, template = chat._talk, chat._talk.template
    before, start = talk.gone, len(talk.ledger)
    talk.feed(template.question(chat.engine, question, first=not talk.ledger.turn_count))
    talk.add_turn("user", question, start=start, before=before)
    before, start = talk.gone, len(talk.ledger)
    talk.replay([*chat.engine.encode(answer), *template.answer_close])
    talk.add_turn("assistant", answer, start=start, before=before)
    if chat._recaller is not None:
        chat._recaller.leave(talk)


def _ask(chat: Chat, item: dict[str, Any], tally: Tally) -> None:
    """Ask, and put the conversation back to where it was."""
    talk, recaller = chat._talk, chat._recaller
    ledger = copy(talk.ledger)
    ledger.ids, ledger.turns = ledger.ids[:], list(ledger.turns)
    present = {} if recaller is None else dict(recaller.present)
    with tempfile.TemporaryDirectory() as folder:
        saved = talk.stream.save(Path(folder) / "s")
        answer = "".join(chat.send(item["question"]))
        restored = chat.engine.restore(saved.path, talk.stream.window)
    talk.close()
    chat._talk = Conversation(talk.frame, restored.stream, ledger, skipped=talk.skipped)
    if recaller is not None:
        tally.brought += any(item["answer"] in passage.text for passage in recaller.brought)
        recaller.present = present
    tally.asked += 1
    tally.right += item["answer"] in answer
    tally.answers.append(answer)
