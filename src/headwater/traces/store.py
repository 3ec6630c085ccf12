"""Recorded traces: a folder that holds the attention a model paid, written band by band and read in chunks.

Knows what is complete: the first so many tokens, a count that moves on only when a band is whole on the disk. So a
recording that was killed is a shorter trace, and can go on. Does not know models, nor how an array lies in files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32

from headwater.errors import InputFileError, TraceNotStored, UsageError
from headwater.traces.facts import TraceFacts, check_format, read_facts
from headwater.traces.trace import CHUNK_BYTES, Chunk, Head, Trace, steps_per_chunk
from headwater.traces.zarray import METADATA, UNFINISHED, Chunks, Triangle, require_zarr


class RecordedTrace(Trace):
    """A recorded trace, or as much of one as is complete; `planned` is how many tokens it was to have.

    Rows are the heads of the first layer, then of the next. Raises InputFileError for a folder that is no recorded
    trace, or one that is damaged; what is damaged deeper inside is found when it is read. Never reads more than one
    chunk at a time. Raises MissingExtra without zarr.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._array, self.facts, recorded = _open(self.folder)
        self.planned = len(self.facts.tokens)
        if recorded < 2:
            raise InputFileError(
                f"{folder} holds {recorded} of {self.planned} tokens, which is no step yet; record it again with the "
                f"same command, and it goes on from there"
            )
        self.tokens = recorded
        self.name = f"{self.facts.model}, {self.facts.text_name}"
        if not self.complete:
            self.name += f" ({recorded} of {self.planned} tokens)"
        self.heads = tuple(Head(layer=layer, head=head) for layer in self.facts.layers for head in self.facts.heads)

    @property
    def complete(self) -> bool:
        """Whether the recording came to its end."""
        return self.tokens == self.planned

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        count = steps_per_chunk(chunk_bytes, rows=self.rows, tokens=self.tokens)
        count = count // self.band * self.band or count
        memory = np.empty(self.rows * min(count, self.tokens) * self.tokens, dtype=np.float32)
        first = 1
        while first < self.tokens:
            stop = min(first // count * count + count, self.tokens)
            weights = memory[: self.rows * (stop - first) * stop].reshape(self.rows, stop - first, stop)
            self.read(range(first, stop), weights.reshape(*self.facts.shape[:2], stop - first, stop))
            yield Chunk(first=first, weights=weights)
            first = stop

    @property
    def band(self) -> int:
        """Tokens that lie together on the disk."""
        return self._array.chunks.tokens

    def read(self, tokens: range, out: Float32[np.ndarray, "layers heads tokens positions"]) -> None:
        """What consecutive tokens paid, the first token among them if it is asked for; `out` ends with the last's
        position. Raises InputFileError for a damaged or missing file, naming it."""
        self._array.read(tokens, out)


class TraceWriter:
    """Writes a trace into a folder, from where it ends now: `recorded` tokens are there, of `facts.tokens`.

    The folder is empty, or is not there and is made with the first tokens, or holds the beginning of the same
    recording. Raises InputFileError for a folder with anything else in it, UsageError for the beginning of another
    recording, naming what differs, MissingExtra without zarr.
    """

    band: int
    """The tokens of every `append` must be a multiple of it, except for the last."""

    def __init__(self, folder: Path | str, facts: TraceFacts) -> None:
        self.folder, self.facts = Path(folder), facts
        self._array: Triangle | None = None
        self.recorded = 0
        if not self._begun():
            require_zarr()
            self.band = Chunks.fitting(facts.shape, facts.dtype).tokens
            return
        self._array, there, self.recorded = _open(self.folder, write=True)
        self.band = self._array.chunks.tokens
        if differences := facts.differences(there):
            raise UsageError(
                f"{folder} holds another recording: {'; '.join(differences)}. Take another folder, or delete this one"
            )
        self.facts = there
        for left in self.folder.glob(f"*{UNFINISHED}"):
            left.unlink()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to write."""
        return self.recorded == len(self.facts.tokens)

    def append(self, first: int, weights: Float[np.ndarray, "layers heads tokens positions"]) -> None:
        """What the tokens from `first` on paid, as an engine's AttentionBlock gives it.

        Raises UsageError for anything but the next tokens in whole bands, TraceNotStored when the disk will not take
        them; then what was recorded before stays as it is.
        """
        stop = first + weights.shape[2]
        expected = (*self.facts.shape[:2], weights.shape[2], stop)
        if weights.shape != expected or weights.dtype.name != self.facts.dtype:
            raise UsageError(
                f"weights are {list(weights.shape)} of {weights.dtype}; "
                f"{list(expected)} of {self.facts.dtype} come next"
            )
        if first != self.recorded or stop > len(self.facts.tokens):
            raise UsageError(
                f"tokens {first} to {stop - 1} do not come next: "
                f"{self.recorded} of {len(self.facts.tokens)} are recorded"
            )
        if stop % self.band and stop < len(self.facts.tokens):
            raise UsageError(f"{weights.shape[2]} tokens are no whole bands of {self.band}")
        with _storing(self.folder, self.recorded, len(self.facts.tokens)):
            if self._array is None:
                self._array = Triangle.create(self.folder, self.facts.shape, self.facts.dtype, self.facts.attributes(0))
            self._array.write(first, weights)
            self._array.set("recorded", stop)
        self.recorded = stop

    def _begun(self) -> bool:
        """Whether the folder holds an array already."""
        if (self.folder / METADATA).exists():
            return True
        if self.folder.exists() and not (self.folder.is_dir() and all(map(_is_unfinished, self.folder.iterdir()))):
            raise InputFileError(f"{self.folder} is there already and is no recorded trace; take another folder")
        return False


def _is_unfinished(path: Path) -> bool:
    return path.suffix == UNFINISHED


def extract(
    trace: RecordedTrace, folder: Path | str, *, layers: Sequence[int], heads: Sequence[int], tokens: int
) -> RecordedTrace:
    """Record a part of a trace into a folder of its own: some heads of some layers, and the first so many tokens.

    Raises UsageError for a part that the trace does not have, and what TraceWriter raises.
    """
    for kind, asked, there in (("layer", layers, trace.facts.layers), ("head", heads, trace.facts.heads)):
        if missing := [number for number in asked if number not in there]:
            raise UsageError(f"{trace.name} has no {kind} {missing[0]}; it has {', '.join(map(str, there))}")
    if not 2 <= tokens <= trace.tokens:
        raise UsageError(f"{trace.name} has {trace.tokens} tokens; an extract has 2 to as many, got {tokens}")
    facts = trace.facts.part(layers=tuple(sorted(layers)), heads=tuple(sorted(heads)), tokens=tokens)
    rows = np.ix_(
        [trace.facts.layers.index(each) for each in facts.layers],
        [trace.facts.heads.index(each) for each in facts.heads],
    )
    writer = TraceWriter(folder, facts)
    for first in range(writer.recorded, tokens, writer.band):
        stop = min(first + writer.band, tokens)
        weights = np.empty((*trace.facts.shape[:2], stop - first, stop), dtype=np.float32)
        trace.read(range(first, stop), weights)
        writer.append(first, weights[rows].astype(facts.dtype))
    return RecordedTrace(folder)


def _open(folder: Path, *, write: bool = False) -> tuple[Triangle, TraceFacts, int]:
    """The array, its facts and how many tokens are complete."""
    metadata = folder / METADATA
    try:
        described = json.loads(metadata.read_bytes())
    except FileNotFoundError as error:
        there = f"{folder} has no {METADATA}" if folder.exists() else f"there is no {folder}"
        raise InputFileError(f"{there}, so it is no recorded trace") from error
    except (ValueError, OSError) as error:
        raise InputFileError(f"{metadata} cannot be read: {error}") from error
    given = described.get("attributes") if isinstance(described, dict) else None
    check_format(given, str(folder))
    array = Triangle.open(folder, write=write)
    facts, recorded = read_facts(array.attributes, array.shape, array.dtype.name, str(folder))
    return array, facts, recorded


@contextmanager
def _storing(folder: Path, recorded: int, planned: int) -> Iterator[None]:
    """Says what is there and how to go on, when the disk will not take what is written."""
    try:
        yield
    except OSError as error:
        raise TraceNotStored(
            f"{error.strerror or error} while writing to {folder}: {recorded} of {planned} tokens are recorded and "
            f"stay readable; make room and run the same command again, and it goes on from there"
        ) from error
