"""What policies are worth live: perplexity and retained attention, and what closing the gaps does.

Retained mass is the share of the attention of the model that keeps everything which falls on what a policy holds, its
own position included, at one step in 64; of a live run, and of the replay of that attention. A live policy sees what
the model attends to after evictions, a replay what it attended to with everything there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.bench.conversation import load
from headwater.bench.measure import script
from headwater.engines.base import Engine, Stream
from headwater.engines.torch_streams import PolicyStream
from headwater.policies import Policy, has_sinks, policy
from headwater.traces import ArrayTrace, replay_all
from headwater.traces.trace import Head

BOOK = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
POLICIES = ("sliding-window", "streaming-llm", "h2o", "tova", "scissorhands", "snapkv", "pyramidkv")
BUDGETS = (128, 256, 512)
TOKENS, PIECE, SINKS = 1536, 64, 4
PAST, TAIL = 9728, 1024
"""A stream past the trained length of 8,192, and how many tokens at its end are scored."""
GAP_POLICIES, GAP_BUDGET = ("h2o", "tova"), 256

Kept = list[NDArray[np.int64]]
"""Positions of every row, layers in turn."""


def made(name: str, budget: int) -> Policy[Any]:
    """A policy with the sinks that it can have."""
    return policy(name, budget=budget, **({"sinks": SINKS} if has_sinks(name) else {}))


def texts(engine: Engine) -> dict[str, list[int]]:
    """A book, and a chat in the model's own template."""
    chat = script(engine, load(None))
    said = [*chat.head, *(token for each in chat.exchanges for token in (*each.question, *each.answer, *each.close))]
    return {"book": engine.encode(BOOK.read_text(encoding="utf-8"))[:TOKENS], "chat": said[:TOKENS]}


def measure_quality(engine: Engine) -> dict[str, Any]:
    """By text, budget and policy."""
    found: dict[str, Any] = {}
    for text, tokens in texts(engine).items():
        weights = _watched(engine, tokens)
        trace = ArrayTrace(weights, name="full attention", heads=_heads(engine))
        full, _ = _run(engine.open(None, limit_tokens=TOKENS), tokens, rows=trace.rows)
        found[text] = {"full": round(_perplexity(full), 4)}
        for budget in BUDGETS:
            choices = [made(name, budget) for name in POLICIES]
            replays = replay_all(trace, choices)
            by_policy: dict[str, Any] = {}
            for choice, replayed in zip(choices, replays, strict=True):
                stream = engine.open(choice.live(block=1) if choice.windowed else choice.live())
                scores, kept = _run(stream, tokens, rows=trace.rows)
                again = [[replayed.kept(at, row) for row in range(trace.rows)] for at in range(PIECE, TOKENS, PIECE)]
                by_policy[choice.name] = {
                    "perplexity": round(_perplexity(scores[budget:]), 4),
                    "over_full": round(_perplexity(scores[budget:]) / _perplexity(full[budget:]), 4),
                    "retained_mass": round(_mass(weights, kept), 4),
                    "retained_mass_replayed": round(_mass(weights, again), 4),
                    "bytes": stream.nbytes,
                }
                stream.close()
                print(text, budget, choice.name, by_policy[choice.name], flush=True)
            found[text][str(budget)] = by_policy
    return {"quality": found, "quality_says": f"{TOKENS:,} tokens of each, {SINKS} sinks where a policy can have them"}


def measure_positions(engine: Engine) -> dict[str, Any]:
    """Perplexity of the last tokens of a stream past the trained length, with the gaps closed and as they are."""
    tokens = engine.encode(BOOK.read_text(encoding="utf-8"))[:PAST]
    near = engine.context_length // 2
    found: dict[str, Any] = {}
    for name in GAP_POLICIES:
        for how in ("compact", "none"):
            stream = engine.open(made(name, GAP_BUDGET).live(), reindex=how == "compact")
            scores, _ = _run(stream, tokens, rows=0)
            found.setdefault(name, {})[how] = {
                "within": round(_perplexity(scores[near - TAIL : near]), 4),
                "past": round(_perplexity(scores[-TAIL:]), 4),
            }
            stream.close()
            print(name, how, found[name][how], flush=True)
    return {"positions": found, "positions_says": {"tokens": PAST, "tail": TAIL, "near": near, "budget": GAP_BUDGET}}


def _run(stream: Stream, tokens: Sequence[int], *, rows: int) -> tuple[NDArray[np.float64], list[Kept]]:
    """The log-probability of every token but the first, and what each row held after every piece."""
    stream.feed(tokens[:1])
    scores, kept = [], []
    for start in range(1, len(tokens), PIECE):
        scores.append(stream.score(tokens[start : start + PIECE]))
        if rows and start + PIECE < len(tokens):
            kept.append(_held(stream, rows))
    return np.concatenate(scores), kept


def _held(stream: Stream, rows: int) -> Kept:
    if isinstance(stream, PolicyStream):
        return [row for positions in stream.kept_by_layer().values() for row in positions]
    return [stream.kept] * rows


def _perplexity(scores: NDArray[np.float64]) -> float:
    return math.exp(-float(scores.mean()))


def _watched(engine: Engine, tokens: Sequence[int]) -> NDArray[np.float32]:
    """What every kv-head of the model that keeps everything attends to: the mean over the query heads of its group."""
    rows, groups = len(_heads(engine)), engine.attention_heads()[1] // _kv_heads(engine)
    weights = np.zeros((rows, len(tokens), len(tokens)), dtype=np.float32)
    for block in engine.attention(tokens, dtype=np.float16):
        count, positions = block.weights.shape[2:]
        grouped = block.weights.reshape(rows, groups, count, positions).mean(1, dtype=np.float32)
        weights[:, block.first : block.first + count, :positions] = grouped
    return weights


def _heads(engine: Engine) -> tuple[Head, ...]:
    return tuple(Head(layer=at, head=head) for at in engine.attention_layers() for head in range(_kv_heads(engine)))


def _kv_heads(engine: Any) -> int:
    return engine.model.config.num_key_value_heads


def _mass(weights: NDArray[np.float32], kept: list[Kept]) -> float:
    """The mean share, over rows and steps, of the attention of a step that fell on what was held before it, and on
    itself."""
    steps = range(PIECE + 1, len(weights[0]), PIECE)
    shares = [
        weights[row, step, positions].sum() + weights[row, step, step]
        for step, rows in zip(steps, kept, strict=True)
        for row, positions in enumerate(rows)
    ]
    return float(np.mean(shares))
