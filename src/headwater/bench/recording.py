"""Recording what a model attends to over a text, and saying what a recording holds: `headwater trace`.

Knows how much is recorded at a time in a stated memory, and what is told to the user. Does not know how weights are
computed, nor how they lie on the disk.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwater import __version__
from headwater.bench.machine import now
from headwater.bench.progress import Progress, Silent, progress
from headwater.bench.sizes import parse_bytes
from headwater.bench.table import size
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.engines.request import spans
from headwater.errors import InputFileError, UsageError
from headwater.traces.facts import DTYPES, VERSION, TraceFacts
from headwater.traces.store import RecordedTrace, TraceWriter

INTERRUPTED = 130
TOKENS = 2048
"""How much of a text is recorded when nothing was said, at most."""
MEMORY_BYTES = 512_000_000
LARGEST_BLOCK = 128
"""Tokens in one forward pass, at most: more of them are not faster."""
WORKING_BYTES = 64 << 20
"""What compressing and writing take beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What the model is to read: a name, the sha256 of the whole text, and its tokens."""

    name: str
    sha256: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A recording that fits the memory: `block` tokens at a time."""

    facts: TraceFacts
    block: int
    memory_bytes: int
    planned_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Of the weights on and below the diagonal, before they are compressed."""
        layers, heads, tokens, _ = self.facts.shape
        return layers * heads * tokens * (tokens + 1) // 2 * np.dtype(self.facts.dtype).itemsize


def read_text(engine: Engine, path: Path) -> Text:
    """The tokens of a file. Raises InputFileError for one that cannot be read, is not UTF-8, or is empty."""
    try:
        content = path.read_bytes()
        tokens = engine.encode(content.decode())
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not a UTF-8 text: {error.reason} at byte {error.start}") from error
    if not tokens:
        raise InputFileError(f"{path} is empty")
    return Text(name=path.name, sha256=hashlib.sha256(content).hexdigest(), tokens=tuple(tokens))


def record(
    engine: Engine,
    text: Text,
    folder: Path,
    *,
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    dtype: str = "float16",
    memory_bytes: int = MEMORY_BYTES,
    bars: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> RecordedTrace:
    """Record the attention over the first `tokens` of a text into a folder, or go on with what is there already.

    Layers and heads are all, or those named. `memory_bytes` bounds what is used beside the model. `tell` gets the
    header: what is recorded, and every choice made for the caller. Raises UsageError for what the text, the model or
    the memory does not have, before anything is written; what TraceWriter raises; UnsupportedCall for a model that does
    not show its attention.
    """
    facts, choices = _facts(engine, text, tokens, layers, heads, dtype)
    kind = np.float16 if dtype == "float16" else np.float32
    engine.attention(
        facts.tokens, layers=facts.layers, heads=facts.heads, dtype=kind
    )  # refuses before a folder is made
    cache_bytes = _cache_bytes(engine, facts.tokens)
    writer = TraceWriter(folder, facts)
    plan = _plan(engine, facts, cache_bytes, writer.band, memory_bytes)
    if tell:
        tell(header(plan, folder, writer.recorded, choices))
    bars = bars or Silent()
    bars.start("recording", len(facts.tokens))
    bars.advance(writer.recorded)
    if not writer.complete:
        blocks = engine.attention(
            facts.tokens,
            layers=facts.layers,
            heads=facts.heads,
            start=writer.recorded,
            block=plan.block,
            dtype=kind,
        )
        for block in blocks:
            writer.append(block.first, block.weights)
            bars.advance(block.weights.shape[2])
            del block  # it must not be there beside the next one
    return RecordedTrace(folder)


def _facts(
    engine: Engine,
    text: Text,
    tokens: int | None,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    dtype: str,
) -> tuple[TraceFacts, list[str]]:
    """What is to be recorded, and the choices made for the caller."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    there, trained = len(text.tokens), engine.context_length
    choices: list[str] = []
    if tokens is None:
        tokens = min(there, trained, TOKENS)
        choices.append(f"the first {tokens:,} of {there:,} tokens, because no number was given")
    if tokens < 2:
        raise UsageError(f"tokens must be at least 2, so that one can look back at another, got {tokens}")
    if tokens > there:
        raise UsageError(f"{text.name} has {there:,} tokens, and {tokens:,} were asked for; ask for fewer")
    if tokens > trained:
        raise UsageError(
            f"{tokens:,} tokens are longer than {engine.name} was trained for; ask for at most {trained:,}"
        )
    watched, count = engine.attention_layers(), engine.attention_heads()[1]
    if len(watched) < max(watched) + 1:
        choices.append(f"only layers {spans(watched)} pay softmax attention; the others cannot be recorded")
    model = engine.facts()
    facts = TraceFacts(
        model=engine.name,
        architecture=model.architecture,
        precision=model.precision,
        tokenizer_sha256=model.tokenizer_sha256,
        rotary=model.rotary,
        trained_length=trained,
        text_name=text.name,
        text_sha256=text.sha256,
        tokens=text.tokens[:tokens],
        layers=watched if layers is None else tuple(sorted(layers)),
        heads=tuple(range(count)) if heads is None else tuple(sorted(heads)),
        dtype=dtype,
        created=now(),
        headwater=__version__,
    )
    return facts, choices


def _cache_bytes(engine: Engine, tokens: Sequence[int]) -> int:
    """What K and V of the tokens take: those of one, that many times, and a quarter for the gaps that they leave in the
    memory as they grow."""
    stream = engine.open(None)
    try:
        stream.feed(tokens[:1])
        return stream.nbytes * len(tokens) * 5 // 4
    finally:
        stream.close()


def _plan(engine: Engine, facts: TraceFacts, cache_bytes: int, band: int, memory_bytes: int) -> Plan:
    """As many tokens at a time as fit, in whole bands. Raises UsageError when not one band does."""
    layers, heads, tokens, _ = facts.shape
    scores = 2 * 4 * engine.attention_heads()[1] * tokens  # of all heads of the layer that is being computed
    weights = layers * heads * tokens * np.dtype(facts.dtype).itemsize
    fixed, each = cache_bytes + WORKING_BYTES, scores + weights
    most = min((memory_bytes - fixed) // each, LARGEST_BLOCK, tokens)
    block = most // band * band if most < tokens else tokens
    if block < 1:
        least = fixed + band * each
        raise UsageError(
            f"{size(memory_bytes)} of memory do not hold {band} tokens of this recording at a time, which take "
            f"{size(least)}; give more, or ask for fewer layers, heads or tokens"
        )
    return Plan(facts=facts, block=block, memory_bytes=memory_bytes, planned_bytes=fixed + block * each)


def header(plan: Plan, folder: Path, recorded: int, choices: Sequence[str]) -> str:
    """What is about to be recorded, and every choice made for the user."""
    facts = plan.facts
    layers, heads, tokens, _ = facts.shape
    free = shutil.disk_usage(
        next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    ).free
    lines = [
        f"Model:  {facts.model} ({facts.architecture}, {facts.precision}), "
        f"trained length {facts.trained_length:,} tokens",
        f"Text:   {facts.text_name}, {tokens:,} tokens",
        f"Rows:   {layers} layers ({spans(facts.layers)}), {heads} heads ({spans(facts.heads)}), as {facts.dtype}",
        f"Memory: {size(plan.planned_bytes)} of {size(plan.memory_bytes)} beside the model, "
        f"{plan.block} tokens at a time",
        f"Disk:   at most {size(plan.weight_bytes)} in {folder}, usually two thirds of it; {size(free)} are free",
        *(f"Choice: {choice}" for choice in choices),
    ]
    if recorded:
        lines.append(f"Choice: {recorded:,} of {tokens:,} tokens are there already; the recording goes on after them")
    return "\n".join(lines)


def run(
    *,
    model: str,
    text: Path,
    output: Path,
    engine: str = "transformers",
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    dtype: str = "float16",
    memory: str = "512MB",
) -> int:
    """Record a model's attention over a text file into the folder `output`; print what it holds.

    Returns the exit code: 0, or 130 after Ctrl-C, when the same call goes on. Raises what `record` raises.
    """
    memory_bytes = parse_bytes(memory)
    opened = open_engine(model, engine=engine)
    try:
        with progress() as bars:
            record(
                opened,
                read_text(opened, text),
                output,
                tokens=tokens,
                layers=layers,
                heads=heads,
                dtype=dtype,
                memory_bytes=memory_bytes,
                bars=bars,
                tell=_tell,
            )
    except KeyboardInterrupt:
        _tell(f"Interrupted; what was recorded is in {output}, and the same command goes on after it")
        return INTERRUPTED
    finally:
        opened.close()
    return show(output)


def show(folder: Path) -> int:
    """Print what a recording holds. Raises InputFileError for a folder that is no recorded trace."""
    for name, value in info(RecordedTrace(folder)):
        print(f"{name + ':':<13} {value}")
    return 0


def info(trace: RecordedTrace) -> list[tuple[str, str]]:
    """What a recording says of itself and what it takes on the disk, as names and texts."""
    facts = trace.facts
    stored = sum(file.stat().st_size for file in trace.folder.rglob("*") if file.is_file())
    layers, heads, *_ = facts.shape
    plain = layers * heads * trace.tokens * (trace.tokens + 1) // 2 * np.dtype(facts.dtype).itemsize
    left = "complete" if trace.complete else f"of {trace.planned:,}; the command that began it goes on after them"
    return [
        ("Folder", str(trace.folder)),
        ("Model", f"{facts.model} ({facts.architecture}, {facts.precision})"),
        ("Trained for", f"{facts.trained_length:,} tokens"),
        ("Rotary", ", ".join(f"{name} {value}" for name, value in facts.rotary.items()) or "none"),
        ("Tokenizer", f"sha256 {facts.tokenizer_sha256}"),
        ("Text", f"{facts.text_name}, sha256 {facts.text_sha256}"),
        ("Tokens", f"{trace.tokens:,}, {left}"),
        ("Layers", f"{layers} ({spans(facts.layers)})"),
        ("Heads", f"{heads} ({spans(facts.heads)})"),
        ("Weights", f"{facts.dtype}; {size(plain)}, which take {size(stored)} on the disk"),
        ("Recorded", f"{facts.created}, by Headwater {facts.headwater}, format {VERSION}"),
    ]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
