"""How far back a chat still answers: the recall horizon, measured for `bench/memory.py`.

A dialogue is told to the model as it was said. At some distances after a booking's reference was given, measured in
tokens, the model is asked for it, answers greedily, and the conversation is put back to where it was. Right is an
answer that holds the reference, letter by letter. At distance 0 the fact is still in the window: no way of remembering
can do better, so that is the ceiling. An answer that was told is fed at once, with room made for all of it by whole
turns, where a chat would make it while the answer grows; what is held after it is the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.chat.conversation import Conversation
from headwater.chat.reminders import Reminders
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine

BUDGET, ALLOWANCE, NOTES, LONGEST_ANSWER = 512, 256, 128, 24
DISTANCES = (0, 1024, 4096, 16384)
RUNS: tuple[tuple[dict[str, Any], tuple[tuple[str, bool], ...]], ...] = (
    ({"policy": "sliding-window"}, (("window", False),)),
    (
        {"policy": "streaming-llm", "memory": True, "memory_tokens": ALLOWANCE},
        (("sinks and window", False), ("with memory", True)),
    ),
    ({"policy": "streaming-llm", "summary_tokens": NOTES}, (("with summaries", True),)),
)
"""How a dialogue is told, and the ways in which it is then asked: reminded or not. Nothing is recalled in the telling,
so what a chat with memory holds is what one without it holds."""
REMINDED = {way: reminded for _, ways in RUNS for way, reminded in ways}


@dataclass(slots=True)
class Tally:
    """Questions asked at a distance, right answers, and those whose evidence was brought."""

    asked: int = 0
    right: int = 0
    brought: int = 0
    answers: list[str] = field(default_factory=list)


def measure(engine: Engine, items: Sequence[dict[str, Any]], sessions: dict[str, Any]) -> dict[str, Any]:
    """Shares by way and distance."""
    tallies = {way: {distance: Tally() for distance in DISTANCES} for way in REMINDED}
    for name in sorted({item["session_id"] for item in items}):
        asked = [item for item in items if item["session_id"] == name]
        for options, ways in RUNS:
            _run(engine, sessions[name]["turns"], asked, options, {way: tallies[way] for way, _ in ways})
            for way, _ in ways:
                print(name, way, {distance: (each.right, each.asked) for distance, each in tallies[way].items()})
    return {
        "recall_horizon": {
            way: {str(distance): _share(way, tally) for distance, tally in each.items()}
            for way, each in tallies.items()
        },
        "recall_horizon_says": f"{len(items)} of the booking questions, budget {BUDGET}, memory may take {ALLOWANCE} "
        f"of it and summaries {NOTES}, answers of up to {LONGEST_ANSWER} tokens, greedy; right is an answer that holds "
        "the reference; brought, that a passage or a note with it came with the question",
    }


def _share(way: str, tally: Tally) -> dict[str, Any]:
    return {
        "questions": tally.asked,
        "right": tally.right / tally.asked if tally.asked else None,
        "brought": tally.brought / tally.asked if tally.asked and REMINDED[way] else None,
        "answers": tally.answers[:3],
    }


def _run(
    engine: Engine,
    turns: Sequence[dict[str, Any]],
    items: Sequence[dict[str, Any]],
    options: dict[str, Any],
    tallies: dict[str, dict[int, Tally]],
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
            for way, tally in tallies.items():
                _ask(chat, items[index], tally[distance], reminded=REMINDED[way])
    chat.close()


def _tell(chat: Chat, question: str, answer: str) -> None:
    """An exchange as it was said, with the notes that would have come with it."""
    talk, template, reminders = chat._talk, chat._talk.template, chat._reminders
    before_it = "" if reminders.notes is None else reminders.notes.bring(talk)
    before, start = talk.gone, len(talk.ledger)
    talk.feed(template.question(chat.engine, before_it + question, first=not talk.ledger.turn_count))
    talk.add_turn("user", question, start=start, before=before)
    before, start = talk.gone, len(talk.ledger)
    talk.feed([*chat.engine.encode(answer), *template.answer_close])
    talk.add_turn("assistant", answer, start=start, before=before)
    reminders.keep(talk)
    chat.idle()


def _ask(chat: Chat, item: dict[str, Any], tally: Tally, *, reminded: bool) -> None:
    """Ask, and put the conversation back to where it was."""
    talk, reminders = chat._talk, chat._reminders
    ledger = copy(talk.ledger)
    ledger.ids, ledger.turns = ledger.ids[:], list(ledger.turns)
    if not reminded:
        chat._reminders = Reminders(None, None)
    saved = {part: dict(vars(part)) for part in (reminders.recaller, reminders.notes) if part is not None}
    with tempfile.TemporaryDirectory() as folder:
        snapshot = talk.stream.save(Path(folder) / "s")
        answer = "".join(chat.send(item["question"]))
        restored = chat.engine.restore(snapshot.path, talk.stream.window)
    tally.brought += _was_brought(chat, item["answer"])
    talk.close()
    chat._talk = Conversation(talk.frame, restored.stream, ledger, skipped=talk.skipped)
    chat._reminders = reminders
    for part, state in saved.items():
        vars(part).update(state)
    tally.asked += 1
    tally.right += item["answer"] in answer
    tally.answers.append(answer)


def _was_brought(chat: Chat, reference: str) -> bool:
    """Whether the reference was in what came with the question, or stands in the notes that were there."""
    recaller, notes = chat._reminders.recaller, chat._reminders.notes
    found = [] if recaller is None else [passage.text for passage in recaller.brought]
    if notes is not None and notes._standing is not None:
        found += [note.text for note in notes._standing[1]]
    return any(reference in text for text in found)
