"""A program that is killed over and over while it chats in a session: `python -m tests.chat.killed FILE RUNS SEED`.

Every run is a fork that goes on with the session, says things, and notes down each answer that was over; it is killed
at a random moment of its opening, streaming, journalling or snapshotting. After each, the session is opened as a user
would and held against the notes. The last line of output is `survived RUNS`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headwater.chat import keeper
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine

GREEDY = Sampling(temperature=0)
BUDGET, SYSTEM = 200, "You are brief."
WORDS = ("hi", "how are you?", "tell me more about it", "and then what happened to the boat?", "é🙂 日本")


tainted: set[Path] = set()
"""Sessions whose cache was made again from the journal after something had been evicted."""


def opened(file: Path) -> Chat:
    return Chat.open(FakeEngine(), session=file, budget=BUDGET, system=SYSTEM, sampling=GREEDY)


def talk(file: Path, notes: Path) -> None:
    """Chat until killed."""
    defaults: Any = keeper.Keeper.__init__.__kwdefaults__
    defaults["every_turns"] = 2  # so that kills meet snapshots, too
    chat = opened(file)
    with notes.open("ab", buffering=0) as log:
        while True:
            said = WORDS[chat.stats().turns % len(WORDS)]
            answer = ""
            for piece in chat.send(said):
                answer += piece
                time.sleep(0.0002)
            log.write(json.dumps([said, answer]).encode() + b"\n")


def check(file: Path, notes: Path) -> bool:
    """Open the session and hold it against what was shown as complete. Whether the cache is the old one to the bit,
    because there was a snapshot of it."""
    shown = [json.loads(line) for line in notes.read_bytes().splitlines()]
    chat = opened(file)
    notice = chat.stats().notice or ""
    messages = [message["content"] for message in chat.messages[1:]]
    pairs = [list(pair) for pair in zip(messages[::2], messages[1::2], strict=True)]
    place = 0
    for exchange in pairs:  # an exchange may be in the journal that was never shown as complete, never the reverse
        if place < len(shown) and exchange == shown[place]:
            place += 1
    if place < len(shown):
        raise AssertionError(f"lost: {shown[place]}, of {len(shown)} shown and {len(pairs)} kept")
    if chat._talk.stream.tokens != chat._talk.held_ids().tolist():  # pyright: ignore[reportAttributeAccessIssue]
        raise AssertionError("the cache does not hold what the journal says")
    if "made again" in notice and chat.stats().evicted_tokens:
        tainted.add(file)  # close to what it was, and never equal again
    exact = file not in tainted
    answer = "".join(chat.send("and now?"))
    if exact and answer != without_kills(pairs):
        raise AssertionError("the next answer is another one than without kills")
    chat.close()
    with notes.open("ab") as log:
        log.write(json.dumps(["and now?", answer]).encode() + b"\n")
    return exact


def without_kills(pairs: list[list[str]]) -> str:
    """What the next answer is in a chat that was never interrupted."""
    whole: Any = Chat.open(FakeEngine(), budget=BUDGET, system=SYSTEM, sampling=GREEDY)
    for said, expected in pairs:
        if not expected:  # a question whose answer was lost with the process
            for due in whole._ask(said, None, None):
                due.feed()
            whole._end_answer()
        elif "".join(whole.send(said)) != expected:
            raise AssertionError(f"the answer to {said!r} was another one than without kills")
    return "".join(whole.send("and now?"))


def main(file: Path, runs: int, seed: int) -> None:
    chance, exact = random.Random(seed), 0
    notes = file.with_suffix(".notes")
    notes.touch()
    for run in range(runs):
        if run % 8 == 0:  # a new session, so that its whole past can be compared
            file = file.with_name(f"talk{run}.db")
            notes = file.with_suffix(".notes")
            notes.touch()
        child = os.fork()
        if child == 0:
            try:
                talk(file, notes)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        exact += check(file, notes)
    print(f"exact {exact}")
    print(f"survived {runs}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
