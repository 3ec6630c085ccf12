"""The trace that `headwater replay` reads: by name or folder, whole or a part of its heads, watched while it is read.

Knows how a trace is found and cut. Does not know policies, nor how a recording is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.bench.progress import Progress
from headwater.bench.replay_results import Source, source
from headwater.engines.request import spans
from headwater.errors import UsageError
from headwater.traces import Chunk, Trace
from headwater.traces.canonical import canonical_trace
from headwater.traces.facts import TraceFacts
from headwater.traces.store import RecordedTrace
from headwater.traces.trace import CHUNK_BYTES

CANONICAL = "canonical"


def open_trace(
    name: str, *, tokens: int | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> tuple[Trace, Source]:
    """The trace of that name or in that folder, or its first `tokens`, or the part of it with these layers and heads.

    Raises InputFileError for a folder that is no recorded trace, UsageError for what the trace does not have.
    """
    if name == CANONICAL:
        trace: Trace = canonical_trace() if tokens is None else canonical_trace(tokens=tokens)
        facts = {"Source": "synthetic, made as the reference figures demand"}
        tokens = None
    else:
        trace = RecordedTrace(name)
        facts = _facts(trace.facts)
    if (tokens, layers, heads) != (None, None, None):
        trace = Part(trace, tokens=tokens, layers=layers, heads=heads)
    return trace, source(trace, facts)


def _facts(recorded: TraceFacts) -> dict[str, str]:
    return {
        "Model": f"{recorded.model}, {recorded.architecture} in {recorded.precision}",
        "Text": f"{recorded.text_name}, sha256 {recorded.text_sha256}",
        "Recorded": f"{recorded.created}, in {recorded.dtype}",
    }


class Part(Trace):
    """The first tokens of a trace, or some of its heads. Raises UsageError for what the trace does not have."""

    def __init__(
        self,
        trace: Trace,
        *,
        tokens: int | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        if tokens is not None and not 1 <= tokens <= trace.tokens:
            raise UsageError(f"{trace.name} has {trace.tokens} tokens, so its first {tokens} cannot be taken")
        _check("layer", layers, [each.layer for each in trace.heads], trace.name)
        _check("head", heads, [each.head for each in trace.heads], trace.name)
        self._trace = trace
        self._rows = [
            row
            for row, each in enumerate(trace.heads)
            if (layers is None or each.layer in layers) and (heads is None or each.head in heads)
        ]
        if not self._rows:
            raise UsageError(f"{trace.name}: none of the heads asked for is in any of the layers asked for")
        self.name, self.tokens = trace.name, trace.tokens if tokens is None else tokens
        self.heads = tuple(trace.heads[row] for row in self._rows)

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        for chunk in self._trace.chunks(chunk_bytes):
            stop = min(self.tokens, chunk.steps.stop)
            yield Chunk(first=chunk.first, weights=chunk.weights[self._rows, : stop - chunk.first, :stop])
            if stop == self.tokens:
                return


class Watched(Trace):
    """A trace that tells how far it has been read: a chunk counts when the next one is asked for."""

    def __init__(self, trace: Trace, progress: Progress, name: str) -> None:
        self._trace, self._progress, self._label = trace, progress, name
        self.name, self.tokens, self.heads = trace.name, trace.tokens, trace.heads

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self._progress.start(self._label, self.steps)
        for chunk in self._trace.chunks(chunk_bytes):
            yield chunk
            self._progress.advance(len(chunk.steps))


def _check(what: str, asked: Sequence[int] | None, there: Sequence[int], name: str) -> None:
    known = sorted(set(there))
    for number in asked or ():
        if number not in known:
            raise UsageError(f"{name} has no {what} {number}; it has {spans(known)}")
