"""What the llama.cpp engine keeps and costs, beside the same library driven as its own programs do.

`python -m bench.engines`. Everything runs through one binding in one process; rivals alternate step by step, and
figures are medians, or means over whole cycles where a step's cost has a cycle. The result goes to
`docs/results/engines.json`, and its figures are the last line printed.

- `llamacpp_over_full`: perplexity of a book from the first eviction on, our defaults in 1,024 tokens, over that of a
  cache that keeps everything, on the same tokens. `own_shift_default_over_full` and `own_shift_keep4_over_full` are the
  library's context shift in as many tokens: half of what may leave goes at once, nothing or four tokens are kept.
- `llamacpp_gap`, `mlx_gap`: the same after a gap of a million positions, over that without one; `..._gap_3x_trained`
  after one of three trained lengths. `llamacpp_flat`: the last tokens
  of a text of three trained lengths, over the same tokens read by a stream that began shortly before them.
- `llamacpp_over_bare`: decode speed of a full session, evictions and logits included, over the bare library at the same
  held length. `eviction_worst_over_plain`: the worst step that turns keys over the median of those that
  do not; `eviction_step_over_plain`: the median one.
- `fed_over_new`: tokens decoded over tokens said, in a chat after its first eviction.
- `resident_growth`: the most that the process took during the long text over what it took when its window was full,
  less 1.
- `greedy_same`: how many of the first 20 likeliest tokens are those of the transformers engine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.clock import take, timed
from headwater.bench.conversation import load
from headwater.bench.machine import hardware, now, versions
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines import mlx_library, open_engine
from headwater.engines.base import Engine, Stream
from headwater.engines.llamacpp import LlamaCppEngine
from headwater.engines.llamacpp_cells import SCORED_PIECE, Seat
from headwater.engines.llamacpp_stream import WindowStream
from headwater.policies.window import Window

BUDGET = 1024
PINS = 4
GAP = 1 << 20
TAIL = 2000
GREEDY = 20


class OwnShift:
    """The library's context shift as its programs do it: a full context loses half of what may leave."""

    def __init__(self, engine: LlamaCppEngine, n_ctx: int, n_keep: int) -> None:
        self.seat: Seat = engine._pool.take(n_ctx)
        self.n_ctx, self.n_keep, self.n_past = n_ctx, n_keep, 0
        self.last = np.empty(0)

    def score(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities of the tokens, given the first one of the first call."""
        scores: list[np.ndarray] = []
        while tokens:
            if self.n_past == self.n_ctx:
                gone = (self.n_past - self.n_keep) // 2
                self.seat.remove(self.n_keep, self.n_keep + gone)
                self.seat.shift(self.n_keep + gone, -gone)
                self.n_past -= gone
            count = min(SCORED_PIECE, self.n_ctx - self.n_past, len(tokens))
            piece, tokens = tokens[:count], tokens[count:]
            after = self.seat.decode(piece, self.n_past, every=True)
            self.n_past += count
            before = np.concatenate([self.last[None], after[:-1]]) if self.last.size else after[:-1]
            scores.append(log_softmax(before, piece if self.last.size else piece[1:]))
            self.last = after[-1]
        return np.concatenate(scores)


def log_softmax(logits: np.ndarray, chosen: list[int]) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return wide[np.arange(len(chosen)), chosen] - np.log(np.exp(wide).sum(axis=1))


def perplexity(scores: np.ndarray) -> float:
    return math.exp(-scores.mean())


def scored(stream: Stream, text: list[int]) -> np.ndarray:
    """Scores of all but the first token; the stream is closed."""
    stream.feed(text[:1])
    scores = stream.score(text[1:])
    stream.close()
    return scores


def book(engine: LlamaCppEngine, model: str, text: list[int]) -> dict[str, Any]:
    """One text under every way to make room, scored from the first eviction on."""
    window = Window.of(BUDGET, PINS)
    found = {"full": perplexity(scored(engine.open(None), text)[BUDGET:])}
    found["ours"] = perplexity(scored(engine.open(window), text)[BUDGET:])
    found["ours, no pins"] = perplexity(scored(engine.open(Window.of(BUDGET, 0)), text)[BUDGET:])
    for name, keep in (("own shift, default", 0), ("own shift, keep 4", 4)):
        own = OwnShift(engine, BUDGET, keep)
        found[name] = perplexity(own.score(text)[BUDGET:])
        engine._pool.give(own.seat)
    for kind in ("q8_0", "q4_0"):
        other = opened(model, engine.settings.n_threads, type_k=kind, type_v=kind)
        half = text[: (len(text) + BUDGET) // 2]
        found[f"full, {kind}, {len(half)} tokens"] = perplexity(scored(other.open(None), half)[BUDGET:])
        found[f"ours, {kind}, {len(half)} tokens"] = perplexity(scored(other.open(window), half)[BUDGET:])
        other.close()
    return {
        "llamacpp_over_full": found["ours"] / found["full"],
        "own_shift_default_over_full": found["own shift, default"] / found["full"],
        "own_shift_keep4_over_full": found["own shift, keep 4"] / found["full"],
        "perplexity": found,
        "perplexity_says": f"{len(text)} tokens, budget and context {BUDGET}, scored from the first eviction on",
    }


def gap(engine: LlamaCppEngine, text: list[int]) -> dict[str, Any]:
    """A window whose positions jump, re-indexed and left where they were."""
    window, gaps = Window.of(256, PINS), (0, 3 * engine.context_length, GAP)
    kept = gaps_scored(engine, window, text[:912], 400, gaps)
    left = gaps_scored(engine, window, text[:912], 400, (GAP,), reindex=False)
    return {
        "llamacpp_gap": kept[GAP] / kept[0],
        "llamacpp_gap_3x_trained": kept[3 * engine.context_length] / kept[0],
        "gap_perplexity": {"re-indexed": kept, "left": left},
        "gap_says": "re-indexed, the library is only told positions below the budget and a gap of it, so it sees none",
    }


def mlx_gap(model: str, text: list[int], scored_tokens: int) -> dict[str, Any]:
    """The same in MLX, over less text: its build for processors is slow. Keys are where that many tokens would have put
    them."""
    engine = open_engine(model, engine="mlx")
    fed = 160
    gaps = (0, 3 * engine.context_length, GAP)
    kept = gaps_scored(engine, Window.of(128, PINS), text[: fed + scored_tokens], fed, gaps)
    engine.close()
    return {
        "mlx_gap": kept[GAP] / kept[0],
        "mlx_gap_3x_trained": kept[3 * engine.context_length] / kept[0],
        "mlx_gap_perplexity": kept,
        "mlx_gap_says": f"{scored_tokens} tokens after {fed}, budget 128, float32 on the CPU",
    }


def gaps_scored(
    engine: Engine, window: Window, text: list[int], fed: int, gaps: tuple[int, ...], *, reindex: bool = True
) -> dict[int, float]:
    """Perplexity of the text after what is fed and a gap, for each gap."""
    found: dict[int, float] = {}
    for skipped in gaps:
        stream = engine.open(window, reindex=reindex)
        stream.feed(text[:fed])
        stream.skip(skipped)
        found[skipped] = perplexity(stream.score(text[fed:]))
        stream.close()
    return found


def long_text(engine: LlamaCppEngine, text: list[int]) -> dict[str, Any]:
    """A text of several trained lengths in one stream; the memory of the process meanwhile."""
    process, window = psutil.Process(), Window.of(BUDGET, PINS)
    stream = engine.open(window)
    resident: list[int] = []
    for start in range(0, len(text) - TAIL, 1000):
        stream.feed(text[start : min(start + 1000, len(text) - TAIL)])
        if start >= 4000:
            resident.append(process.memory_info().rss)
    tail = text[-TAIL:]
    far = perplexity(stream.score(tail))
    stream.close()
    fresh = engine.open(window)
    fresh.feed(text[-TAIL - 3 * BUDGET : -TAIL])
    near = perplexity(fresh.score(tail))
    fresh.close()
    return {
        "llamacpp_flat": far / near,
        "flat_says": f"the last {TAIL} of {len(text)} tokens, of which the trained length is {engine.context_length}",
        "resident_growth": max(resident) / resident[0] - 1 if resident else math.nan,
        "resident_bytes": resident,
    }


def speed(engine: LlamaCppEngine, text: list[int], steps: int) -> dict[str, Any]:
    """A session's steps and the bare library's, in turn, at the same held length."""
    window = Window.of(BUDGET, PINS)
    stream = engine.open(window)
    assert isinstance(stream, WindowStream)
    stream.feed(text[: BUDGET + 1])
    held = stream.held
    seat = engine._pool.take(BUDGET + 1)
    for start in range(0, held, 256):
        seat.decode(text[start : min(start + 256, held)], start)
    bare = bare_step(engine, seat)
    seconds: dict[str, list[float]] = {"ours": [], "bare": [], "plain": [], "turning": []}
    position = held
    for step in range(steps):
        token = text[BUDGET + 1 + step]
        kind = "turning" if stream._gap >= stream._close_at else "plain"
        seconds["ours"].append(timed(lambda token=token: stream.feed([token])))
        seconds[kind].append(seconds["ours"][-1])
        if position > stream.held:  # no further than the session
            seat.remove(stream.held, -1)
            position = stream.held
        seconds["bare"].append(timed(lambda token=token, position=position: bare(token, position)))
        position += 1
    copying = [timed(lambda: seat._logits(1)) for _ in range(50)]
    stream.close()
    engine._pool.give(seat)
    plain = statistics.median(seconds["plain"])
    return {
        "llamacpp_over_bare": statistics.fmean(seconds["bare"]) / statistics.fmean(seconds["ours"]),
        "eviction_worst_over_plain": max(seconds["turning"]) / plain,
        "eviction_step_over_plain": statistics.median(seconds["turning"]) / plain,
        "logits_over_step": statistics.median(copying) / plain,
        "step_seconds": {
            name: {"mean": statistics.fmean(each), "median": statistics.median(each), "worst": max(each)}
            for name, each in seconds.items()
        },
        "step_says": f"{steps} steps each, budget {BUDGET}; bare is llama_decode and a wait for its result",
    }


def bare_step(engine: LlamaCppEngine, seat: Seat) -> Callable[[int, int], None]:
    """A decode of one token with nothing around it: logits are made and stay where they are."""
    call, context = engine.model.library.call, seat.context
    synchronise = call.llama_synchronize
    synchronise.restype, synchronise.argtypes = None, (ctypes.c_void_p,)

    def step(token: int, position: int) -> None:
        code = call.llama_decode(context.pointer, context._batch.filled([token], position, seat.number, every=False))
        assert code == 0
        synchronise(context.pointer)

    return step


def talk(engine: LlamaCppEngine, turns: int) -> dict[str, Any]:
    """A chat past its budget: what is decoded beside what is said. Decoding is counted where the library is called."""
    decoded = [0]
    plain = Seat.decode

    def counted(self: Seat, tokens: Any, position: int, **options: Any) -> Any:
        decoded[0] += len(tokens)
        return plain(self, tokens, position, **options)

    questions = [pair.question for pair in load(None).exchanges]
    chat = Chat.open(engine, budget=512, sampling=Sampling(temperature=0), max_tokens=16)
    fed: list[tuple[int, int]] = []
    Seat.decode = counted
    try:
        for turn in range(turns):
            before, said = decoded[0], chat.stats().seen
            for _ in chat.send(questions[turn % len(questions)]):
                pass
            if chat.stats().evicted_tokens:
                fed.append((decoded[0] - before, chat.stats().seen - said))
    finally:
        Seat.decode = plain
        chat.close()
    return {
        "fed_over_new": sum(each for each, _ in fed) / sum(new for _, new in fed) if fed else math.nan,
        "fed_over_new_worst_turn": max((each / new for each, new in fed), default=math.nan),
        "fed_says": f"{turns} exchanges in a budget of 512, {len(fed)} of them after the first eviction",
    }


def agreement(engine: LlamaCppEngine, model: str) -> dict[str, Any]:
    """The likeliest tokens after one prompt, on this engine and on transformers with the same weights unpacked."""
    other = open_engine(model)
    prompt = engine.render([{"role": "user", "content": "Name three rivers."}], open_answer=True)
    ids = engine.encode(prompt, special=True)
    runs: list[list[int]] = []
    for each in (engine, other):
        stream = each.open(None)
        logits, out = stream.feed(ids), list[int]()
        for _ in range(GREEDY):
            out.append(int(logits.argmax()))
            logits = stream.feed(out[-1:])
        stream.close()
        runs.append(out)
    other.close()
    same = next((index for index, pair in enumerate(zip(*runs, strict=True)) if len(set(pair)) > 1), GREEDY)
    return {
        "greedy_same": same,
        "greedy_text": engine.decode(runs[0]),
        "greedy_text_transformers": engine.decode(runs[1]),
    }


def opened(model: str, threads: int, **options: Any) -> LlamaCppEngine:
    engine = open_engine(model, engine="llamacpp", n_threads=threads, **options)
    assert isinstance(engine, LlamaCppEngine)
    return engine


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("bench/data/voyage_of_the_beagle.txt"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=Path("docs/results/engines.json"))
    parser.add_argument("--quick", action="store_true", help="short runs, for trying the script out")
    options = parser.parse_args()
    started, began = now(), time.perf_counter()
    engine = opened(options.model, options.threads)
    print(f"{started} {hardware()}\n{versions()}, {options.threads} threads, no seed: nothing is drawn")
    ids = engine.encode(options.text.read_text(encoding="utf-8"))
    figures: dict[str, Any] = {}
    take(figures, gap(engine, ids))
    take(figures, speed(engine, ids, 130 if options.quick else 1008))
    take(figures, book(engine, options.model, ids[: 1400 if options.quick else 5000]))
    take(figures, talk(engine, 12 if options.quick else 100))
    take(figures, agreement(engine, options.model))
    if mlx_library.missing() is None:
        take(figures, mlx_gap(options.model, ids, 16 if options.quick else 96))
    take(figures, long_text(engine, ids[: 8000 if options.quick else 25_000]))
    report = {
        "started": started,
        "seconds": round(time.perf_counter() - began),
        "hardware": hardware(),
        "versions": versions(),
        "threads": options.threads,
        "model": options.model,
        "text": options.text.name,
        "quick": options.quick,
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if isinstance(value, int | float)}))


if __name__ == "__main__":
    main()
