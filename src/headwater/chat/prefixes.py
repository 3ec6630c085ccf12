"""System prompts that were read before: their K and V are computed once and shared by every session that begins so.

Knows which streams are alike: the same model, window and head. Does not know how a snapshot looks. What is shared is a
file; a stream that is made of it has memory of its own, so nothing that one conversation does reaches another.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from headwater.chat.conversation import Frame
from headwater.engines.base import Engine, Stream
from headwater.engines.snapshot import told
from headwater.errors import HeadwaterError, SnapshotError

MOST = 32
"""How many are kept; of more, those that were not used for longest go."""

HALF_S = 3600
"""A file that is not whole after so long is that of a process that was killed."""


class Prefixes:
    """The prompts in a folder. `trouble` says why one could not be kept, `computed` how many tokens of the last one
    that was opened came from no file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble: str | None = None
        self.computed = 0

    def open(self, engine: Engine, frame: Frame) -> Stream:
        """A stream that has read the frame's head: from the file where there is a sound one, else read now and kept."""
        head = list(frame.template.head)
        file = self._file(engine, frame)
        try:
            stream = engine.restore(file, frame.holds, limit_tokens=frame.limit_tokens).stream
            file.touch()
            self.computed = 0
            return stream
        except (SnapshotError, OSError):
            pass  # not there, or not sound: it is made again below
        stream = frame.open(engine)
        stream.feed(head)
        self.computed = len(head)
        try:
            stream.save(file)
            self._tidy()
            self.trouble = None
        except (HeadwaterError, OSError) as error:
            self.trouble = f"the system prompt's cache was not kept: {error}"
        return stream

    def _file(self, engine: Engine, frame: Frame) -> Path:
        known = [engine.fingerprint, told(frame.holds), list(frame.template.head)]
        return self.folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.safetensors"

    def _tidy(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
        stale = time.time() - HALF_S
        halves = [file for file in self.folder.glob(".*.half") if file.stat().st_mtime < stale]
        for file in [*files[MOST:], *halves]:
            file.unlink(missing_ok=True)
