"""What memory finds, and how fast: `python -m bench.memory --data FOLDER`.

Retrieval, over the questions in FOLDER: `recall_bookings.jsonl` with `dialogues.jsonl` (MultiWOZ, MIT) and
`recall.jsonl` with `recall_sessions.jsonl` (LoCoMo, Maharana et al., ACL 2024, CC BY-NC 4.0: read where it lies, never
copied). A question is answered from its own conversation, all of which is indexed, an exchange a passage; found means
that a passage with a turn of the evidence is among the first. The numbers in `headwater.memory` were chosen on the
conversations of one half, `tuned`; the other is `held_out`, and all questions are under the names asked for.

The result, with what a session costs (`bench/session.py`) and how far back a chat answers (`bench/horizon.py`), goes to
`docs/results/memory.json`; its figures are the last line printed.

Speed: a query over 10,000 and 200,000 passages of one conversation, made of the words of the book of `bench/data`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import horizon, session
from bench.clock import take, timed
from headwater.bench.machine import hardware, now, versions
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.memory import Memory, Passage
from headwater.memory.words import words_of

BOOK = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
SIZES = (10_000, 200_000)
QUERIES = 60
FIRST = (1, 5)
PARTS = ("retrieval", "speed", "session", "horizon")
SEED = 0

Search = Callable[[str, str], Sequence[str]]
"""The keys of what is found for a question in a conversation, best first."""


def measure_retrieval(folder: Path) -> dict[str, Any]:
    """Every figure about what is found. A file that is not there is skipped, and the result says which."""
    figures: dict[str, Any] = {"retrieval": {}, "skipped": []}
    for name, questions, sessions, passages in (
        ("bookings", "recall_bookings.jsonl", "dialogues.jsonl", _exchanges),
        ("locomo", "recall.jsonl", "recall_sessions.jsonl", _pairs),
    ):
        if not (folder / questions).exists() or not (folder / sessions).exists():
            figures["skipped"].append(f"{name}: {questions} or {sessions} is not in the folder")
            continue
        items, said = _lines(folder / questions), {each["session_id"]: each for each in _lines(folder / sessions)}
        known = {key: passages(said[key]) for key in {item["session_id"] for item in items}}
        figures["retrieval"][name] = _compare(items, known)
    found = figures["retrieval"]
    if "bookings" in found:
        figures["recall_at_5_bookings"] = found["bookings"]["fused"]["all"]["recall_at_5"]
    if "locomo" in found:
        figures["recall_at_5_single_hop"] = found["locomo"]["fused"]["single-hop"]["recall_at_5"]
    return figures


def _compare(items: Sequence[dict[str, Any]], known: dict[str, list[tuple[set[Any], str]]]) -> dict[str, Any]:
    """Fused against words alone and meaning alone."""
    memory = Memory()
    evidence: dict[str, set[Any]] = {}
    for conversation, passages in known.items():
        kept = []
        for number, (turns, text) in enumerate(passages, start=1):
            evidence[f"{conversation}:{number}"] = turns
            kept.append(Passage(key=f"{conversation}:{number}", conversation=conversation, number=number, text=text))
        memory.remember(kept)

    def fused(text: str, conversation: str) -> Sequence[str]:
        return [each.passage.key for each in memory.recall(text, conversation=conversation, limit=50)]

    def keys(found: Iterable[int]) -> list[str]:
        return [memory._rows.execute("SELECT key FROM passages WHERE id = ?", (each,)).fetchone()[0] for each in found]

    def bm25(text: str, conversation: str) -> Sequence[str]:
        """SQLite's own, with nothing of ours."""
        rows = memory._rows.execute(
            "SELECT key FROM passage_words JOIN passages ON passages.id = passage_words.rowid "
            "WHERE passage_words MATCH ? AND conversation = ? ORDER BY bm25(passage_words), passages.id LIMIT 50",
            (" OR ".join(f'"{word}"' for word in words_of(text)), conversation),
        )
        return [key for (key,) in rows]

    ways: dict[str, Search] = {
        "fused": fused,
        "BM25 alone": bm25,
        "words alone": lambda text, conversation: keys(memory._by_words(text, conversation, 50)),
        "meaning alone": lambda text, conversation: keys(memory._by_meaning(text, conversation, 50)),
    }
    out: dict[str, Any] = {}
    for name, search in ways.items():
        ranks = [_rank(search(item["question"], item["session_id"]), evidence, item) for item in items]
        groups: dict[str, list[int]] = {"all": [], "tuned": [], "held_out": []}
        for item, rank in zip(items, ranks, strict=True):
            half = "tuned" if hashlib.sha256(item["session_id"].encode()).digest()[0] % 2 else "held_out"
            for group in ("all", half, item["category"], f"{item['category']}, {half}"):
                groups.setdefault(group, []).append(rank)
        out[name] = {group: _scores(found) for group, found in groups.items() if found}
    memory.close()
    return out


def _rank(found: Sequence[str], evidence: dict[str, set[Any]], item: dict[str, Any]) -> int:
    """The place of the first passage with evidence, from 1; 0 where there is none."""
    wanted = set(item["evidence_turns"])
    return next((place for place, key in enumerate(found, start=1) if evidence[key] & wanted), 0)


def _scores(ranks: Sequence[int]) -> dict[str, float]:
    share = {f"recall_at_{k}": sum(0 < rank <= k for rank in ranks) / len(ranks) for k in FIRST}
    return {**share, "mrr": sum(1 / rank for rank in ranks if rank) / len(ranks), "questions": len(ranks)}


def _exchanges(session: dict[str, Any]) -> list[tuple[set[Any], str]]:
    turns = session["turns"]
    return [
        ({i, i + 1}, "\n".join(f"{turn['role']}: {turn['text']}" for turn in turns[i : i + 2]))
        for i in range(0, len(turns), 2)
    ]


def _pairs(session: dict[str, Any]) -> list[tuple[set[Any], str]]:
    def said(turn: dict[str, Any]) -> str:
        shown = f" [{turn['image_caption']}]" if turn.get("image_caption") else ""
        return f"{turn['speaker']}: {turn['text']}{shown}"

    turns = session["turns"]
    pairs = [turns[i : i + 2] for i in range(0, len(turns), 2)]
    return [({turn["id"] for turn in pair}, "\n".join(map(said, pair))) for pair in pairs]


def measure_speed(sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Milliseconds of a search, and what indexing costs."""
    words = BOOK.read_text(encoding="utf-8").split()
    chance = random.Random(SEED)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            memory = Memory(Path(folder) / f"{size}.db")
            began = time.perf_counter()
            for start in range(0, size, 5000):
                memory.remember([_made(words, chance, number) for number in range(start, start + 5000)])
            indexing = time.perf_counter() - began
            memory.close()
            memory = Memory(Path(folder) / f"{size}.db")
            queries = [" ".join(words[at : at + 12]) for at in chance.sample(range(len(words) - 12), QUERIES + 1)]
            cold = timed(lambda memory=memory, queries=queries: memory.recall(queries[0], conversation="c"))
            searches = [lambda memory=memory, query=query: memory.recall(query, conversation="c") for query in queries]
            times = sorted(map(timed, searches[1:]))
            memory.close()
            figures |= {
                f"search_ms_{size}": statistics.median(times) * 1000,
                f"search_ms_{size}_p95": times[int(0.95 * len(times))] * 1000,
                f"search_ms_{size}_first": cold * 1000,
                f"indexed_per_s_{size}": size / indexing,
                f"bytes_per_passage_{size}": (Path(folder) / f"{size}.db").stat().st_size / size,
            }
    return figures


def _made(words: Sequence[str], chance: random.Random, number: int) -> Passage:
    at = chance.randrange(len(words) - 60)
    text = " ".join(words[at : at + chance.randrange(15, 60)])
    return Passage(key=f"c:{number}", conversation="c", number=number + 1, text=text)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _horizon(data: Path, engine: Engine, dialogues: int, every: int) -> dict[str, Any]:
    if not (data / "recall_bookings.jsonl").exists():
        return {}
    items = _lines(data / "recall_bookings.jsonl")
    names = sorted({item["session_id"] for item in items})[:dialogues]
    items = [item for item in items if item["session_id"] in names][::every]
    return horizon.measure(engine, items, {each["session_id"]: each for each in _lines(data / "dialogues.jsonl")})


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the questions")
    parser.add_argument("--every", type=int, default=1, help="ask every so many booking questions for the horizon")
    parser.add_argument("--dialogues", type=int, default=4, help="in so many dialogues; an hour for all four")
    parser.add_argument("--output", type=Path, default=session.OUTPUT)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the others stay as they are stored")
    options = parser.parse_args()
    whole = set(options.parts) == set(PARTS)
    figures: dict[str, Any] = {} if whole else json.loads(options.output.read_text(encoding="utf-8"))
    figures |= {"hardware": hardware(), "versions": versions(), "seed": SEED}
    print(f"{figures['hardware']}\n{figures['versions']}")
    engine = open_engine("smollm2")
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "retrieval": lambda: measure_retrieval(options.data),
        "speed": measure_speed,
        "session": lambda: session.measure(engine),
        "horizon": lambda: _horizon(options.data, engine, options.dialogues, options.every),
    }
    for part in options.parts:
        figures[f"{part}_started"] = now()
        take(figures, measures[part]())
    options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if isinstance(value, int | float)}))


if __name__ == "__main__":
    main()
