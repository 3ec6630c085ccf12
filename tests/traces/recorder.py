"""A process that records the fake engine's attention and may be killed or run out of disk at any moment."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

from headwater.engines.fake import FakeEngine
from headwater.traces.store import TraceWriter
from tests.traces.recordings import facts

TOKENS = 1100
ENGINE = FakeEngine()
TEXT = [(index * index) % 251 for index in range(TOKENS)]
FACTS = replace(
    facts(layers=ENGINE.attention_layers(), heads=range(ENGINE.attention_heads()[1])),
    tokens=tuple(TEXT),
    dtype="float32",
)


def record(folder: Path, *, file_bytes: int | None = None) -> None:
    """Record, or go on; no file may grow above `file_bytes`."""
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    writer = TraceWriter(folder, FACTS)
    if not writer.complete:
        for block in ENGINE.attention(TEXT, start=writer.recorded, block=writer.band):
            writer.append(block.first, block.weights)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
