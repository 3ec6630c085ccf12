"""A document in pieces that can be recalled one by one.

Knows where a text may be cut. Does not know where the pieces go.
"""

from __future__ import annotations

import re
from pathlib import Path

from headwater.errors import InputFileError

PIECE = 900
"""Characters in a piece, at most."""
LARGEST_BYTES = 16_000_000
"""Some twenty novels: writing them into the index keeps others from writing for a few seconds."""


def read_document(path: Path) -> str:
    """The text of a file. Raises InputFileError for one that cannot be read, is no UTF-8 text, empty or too large."""
    try:
        if (size := path.stat().st_size) > LARGEST_BYTES:
            raise InputFileError(f"{path} has {size:,} bytes; at most {LARGEST_BYTES:,} are taken, so split it")
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not a UTF-8 text: {error.reason} at byte {error.start}") from error
    if "\0" in text:
        raise InputFileError(f"{path} is not a text: it has a NUL at character {text.index(chr(0)) + 1}")
    if not text.strip():
        raise InputFileError(f"{path} is empty")
    return text


def pieces(text: str, most: int = PIECE) -> list[str]:
    """The text in pieces of at most `most` characters: whole paragraphs where they fit, else sentences, else words,
    else as many characters as fit."""
    out: list[str] = []
    current = ""
    for part in _parts(text, most):
        if current and len(current) + len(part) > most:
            out.append(current.strip())
            current = ""
        current += part
    out.append(current.strip())
    return [piece for piece in out if piece]


def _parts(text: str, most: int) -> list[str]:
    out = [text]
    for pattern in (r"(?<=\n)\s*\n", r"(?<=[.!?])\s+", r"\s+"):
        divided: list[str] = []
        for part in out:
            divided += [part] if len(part) <= most else _split_after(pattern, part)
        out = divided
    return [part[start : start + most] for part in out for start in range(0, len(part), most)]


def _split_after(pattern: str, text: str) -> list[str]:
    ends = [match.end() for match in re.finditer(pattern, text)]
    return [text[start:stop] for start, stop in zip([0, *ends], [*ends, len(text)], strict=True) if start < stop]
