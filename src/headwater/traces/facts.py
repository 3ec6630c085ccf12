"""What a recorded trace says of itself: which model paid this attention, over which text.

Knows the attributes of the format and what would contradict what. Does not know arrays, files or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from headwater.errors import InputFileError

FORMAT, VERSION = "headwater-trace", 1
DTYPES = ("float16", "float32")
WHEN = ("created", "headwater")
"""Facts about the recording's beginning; they do not tell one recording from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """A recording to be made, or one that was made. `tokens` are the ids that were fed, `layers` and `heads` what was
    watched, in the model's count; `text_sha256` is that of the whole text, of which the tokens may be the beginning."""

    model: str
    architecture: str
    precision: str
    tokenizer_sha256: str
    rotary: Mapping[str, Any]
    trained_length: int
    text_name: str
    text_sha256: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    dtype: str
    created: str
    headwater: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the array that holds it: layers, heads, tokens, positions."""
        return len(self.layers), len(self.heads), len(self.tokens), len(self.tokens)

    def part(self, *, layers: tuple[int, ...], heads: tuple[int, ...], tokens: int) -> TraceFacts:
        """The facts of a part."""
        return replace(self, layers=layers, heads=heads, tokens=self.tokens[:tokens])

    def differences(self, other: TraceFacts) -> list[str]:
        """What makes another recording than `other`, in words, `other` being what is there."""
        return [
            f"{name} is {_short(getattr(other, name))} there and {_short(getattr(self, name))} now"
            for name in (field.name for field in fields(self) if field.name not in WHEN)
            if _plain(getattr(self, name)) != _plain(getattr(other, name))
        ]

    def attributes(self, recorded: int) -> dict[str, Any]:
        """As JSON, with how many tokens are recorded."""
        facts = {name: _plain(value) for name, value in asdict(self).items()}
        return {"format": FORMAT, "version": VERSION, "recorded": recorded, **facts}


def check_format(given: object, where: str) -> None:
    """Raises InputFileError for attributes that are no trace's, or of another version; `where` says whose they are."""
    if not isinstance(given, Mapping) or given.get("format") != FORMAT:
        raise InputFileError(f"{where} is in Zarr's format, and no trace that Headwater recorded")
    if given.get("version") != VERSION:
        raise InputFileError(
            f"{where} is a trace of format version {given.get('version')!r}, and this Headwater reads version "
            f"{VERSION}; update Headwater, or record it again"
        )


def read_facts(given: Mapping[str, Any], shape: tuple[int, ...], dtype: str, where: str) -> tuple[TraceFacts, int]:
    """The facts in these attributes of an array, and how many tokens are recorded.

    Raises InputFileError for attributes that are missing, or that contradict the array or each other.
    """
    facts = TraceFacts(
        **{field.name: _checked(given, field.name, str(field.type), where) for field in fields(TraceFacts)}
    )
    recorded = _checked(given, "recorded", "int", where)
    wrong = next(_contradictions(facts, recorded, shape, dtype), None)
    if wrong:
        raise InputFileError(f"{where} contradicts itself: {wrong}; it was altered, record it again")
    return facts, recorded


def _contradictions(facts: TraceFacts, recorded: int, shape: tuple[int, ...], dtype: str) -> Iterator[str]:
    if shape != facts.shape:
        yield (
            f"its array is {list(shape)}, and {len(facts.layers)} layers, {len(facts.heads)} heads and "
            f"{len(facts.tokens)} tokens are listed"
        )
    if facts.dtype not in DTYPES or dtype != facts.dtype:
        yield f"its array is of {dtype}, and dtype says {facts.dtype!r}"
    for name in ("layers", "heads"):
        numbers = getattr(facts, name)
        if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 0:
            yield f"{name} are {_short(numbers)}, which is no ascending list of numbers from 0"
    if not 0 <= recorded <= len(facts.tokens):
        yield f"{recorded} of {len(facts.tokens)} tokens are said to be recorded"
    if len(facts.tokens) > facts.trained_length:
        yield f"{len(facts.tokens)} tokens are more than the trained length of {facts.trained_length}"


def _checked(given: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    """The attribute of that name, of the kind that its field is annotated with."""
    value = given.get(name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and whole:
        return value
    if kind.startswith("Mapping") and isinstance(value, Mapping):
        return dict(value)
    if kind.startswith("tuple") and isinstance(value, list) and all(type(each) is int for each in value):
        return tuple(value)
    raise InputFileError(f"{where} says that {name} is {_short(value)}; it was altered, record it again")


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _short(value: Any) -> str:
    text = repr(_plain(value))
    return text if len(text) <= 60 else f"{text[:40]}...{text[-12:]}"
