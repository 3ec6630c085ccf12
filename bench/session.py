"""What keeping a session costs: snapshots, restores, and the journal: `python -m bench.session`.

Rivals alternate in one process, figures are medians, and the bound stands beside the measurement. `measure()` is a part
of `docs/results/memory.json`; run alone, it puts its figures there in the place of the old ones.

- `snapshot_over_write`: copying a full cache and writing it, over writing as many bytes and waiting for the disk.
- `snapshot_copy_over_step`: the copy alone, which is how long a chat is held up, over a decode step.
- `snapshot_bytes_over_held`: the file over the bytes that the cache holds.
- `restore_over_bound`: a restore and the next step, over two decode steps and reading the file.
- `journal_overhead`: time that the journal takes of a chat's turns, as a share of the decode time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.clock import timed
from headwater.bench.conversation import load
from headwater.chat.keeper import Keeper
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.policies.window import Window

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "memory.json"
BUDGET = 2048
ROUNDS = 9
TURNS = 12


def measure(engine: Engine | None = None) -> dict[str, Any]:
    """Every figure of this file."""
    opened = open_engine("smollm2") if engine is None else engine
    with tempfile.TemporaryDirectory() as folder:
        return {**snapshots(opened, Path(folder)), **journal(opened, Path(folder))}


def snapshots(engine: Engine, folder: Path) -> dict[str, Any]:
    """A cache whose ring has wrapped, saved and restored again and again."""
    window = Window.of(BUDGET, pins=4)
    stream = engine.open(window)
    said = " ".join(f"{pair.question} {pair.answer}" for pair in load(None).exchanges)
    text = engine.encode(said)[: BUDGET + 400]
    stream.feed(text)
    while stream.held < BUDGET:
        stream.feed(text[:1])
    file, plain = folder / "cache.safetensors", folder / "plain"
    token = [text[0]]
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "save", "write", "read", "step", "restored")}
    engine.restore(stream.save(file).path, window).stream.close()
    content = file.read_bytes()
    for _ in range(ROUNDS):
        seconds["write"].append(timed(lambda: _write(plain, content)))
        began = time.perf_counter()
        snapshot = stream.snapshot()
        seconds["copy"].append(time.perf_counter() - began)
        snapshot.write(file)
        seconds["save"].append(time.perf_counter() - began)
        del snapshot  # as a chat does, so that its memory serves the next one
        os.sync()  # or the disk's work would be counted below
        seconds["read"].append(timed(file.read_bytes))
        other = engine.restore(file, window).stream
        seconds["step"].append(statistics.median(timed(lambda other=other: other.feed(token)) for _ in range(3)))
        other.close()
        began = time.perf_counter()
        other = engine.restore(file, window).stream
        other.feed(token)
        seconds["restored"].append(time.perf_counter() - began)
        other.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    held = stream.nbytes * stream.held // (window.budget + 1)
    return {
        "snapshot_over_write": median["save"] / median["write"],
        "snapshot_copy_over_step": median["copy"] / median["step"],
        "snapshot_bytes_over_held": len(content) / held,
        "snapshot_bytes": len(content),
        "restore_over_bound": median["restored"] / (2 * median["step"] + median["read"]),
        "restore_seconds": median,
        "restore_says": f"{window.budget} tokens of float32; file and its reading come from the system's cache",
    }


def _write(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def journal(engine: Engine, folder: Path) -> dict[str, Any]:
    """A chat whose time in the journal is counted: its writes, and what a snapshot holds it up."""
    spent = [0.0]

    def counted(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    chat = Chat.open(engine, session=folder / "talk.db", budget=1024, sampling=Sampling(temperature=0), max_tokens=48)
    keeper: Any = chat._keeper
    assert isinstance(keeper, Keeper)
    plain: Any = keeper
    plain.turn, plain.rest = counted(keeper.turn), counted(keeper.rest)
    began, tokens = time.perf_counter(), 0
    for pair in load(None).exchanges[:TURNS]:
        tokens += sum(1 for _ in chat.send(pair.question))
    whole = time.perf_counter() - began
    chat.close()
    return {
        "journal_overhead": spent[0] / (whole - spent[0]),
        "journal_ms_per_turn": spent[0] / (2 * TURNS) * 1000,
        "journal_says": f"{TURNS} exchanges of up to 48 tokens, every message on the disk before the next; a "
        "snapshot is due after 16 messages or a minute, and what it holds the chat up is in it",
    }
