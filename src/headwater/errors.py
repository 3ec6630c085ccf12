"""Every exception that Headwater raises on purpose.

The doors translate this tree once: the command line to an exit code, a server to an HTTP status.

    HeadwaterError                 exit code 1
    ├── UsageError                 a value that cannot be used; also a ValueError      exit code 2
    │   ├── UnknownName            a policy, model, engine or option nobody knows; lists the known ones
    │   ├── BudgetError            a budget, pins, block or window that do not fit together
    │   └── InputFileError         a conversation or text file that cannot be read; names the line
    ├── UnsupportedModel           this model cannot run with this cache; says which layer and why
    ├── UnsupportedCall            this way of calling the model cannot work with this cache
    ├── CacheStateError            what was passed contradicts what the cache holds
    ├── ContextFull                a stream that never evicts has no room left
    ├── OverCapacity               a policy driven past the budget it was built for; also a RuntimeError
    ├── PolicyFault                a policy that breaks the contract: a victim not held, a budget missed
    ├── StoreError                 the user's database cannot be read or written; says why and what to do
    │   └── SessionBusy            a session that another process has open; says which
    ├── SnapshotError              a snapshot of a cache that cannot be used: truncated, altered, of another model
    ├── MemoryFault                what was said cannot be kept or found again; a chat goes on without
    ├── TraceNotStored             a recording that the disk would not take; says what is there and how to go on
    ├── MissingExtra               an optional dependency is not installed; says the command
    ├── UnsupportedVersion         a dependency is installed in a release that was never tested; says the range
    ├── ModelMissing               a model is not on this machine; says the command
    └── ModelFileError             a model's files cannot be had, trusted, converted or stored; says why
"""

from __future__ import annotations

from collections.abc import Iterable


class HeadwaterError(Exception):
    """Base of every error raised on purpose; its text is meant for the user."""


class UsageError(HeadwaterError, ValueError):
    """A value was given that cannot be used. The text says what was given and what is allowed."""


class UnknownName(UsageError):
    """A name that nobody knows. `also` says what else than a known name is accepted."""

    def __init__(self, kind: str, given: str, known: Iterable[str], *, also: str = "") -> None:
        self.kind, self.given, self.known = kind, given, tuple(sorted(known))
        more = f"; also accepted: {also}" if also else ""
        super().__init__(f"unknown {kind} {given!r}; known: {', '.join(self.known)}{more}")


class BudgetError(UsageError):
    """A budget, pins, block or window that do not fit together."""


class InputFileError(UsageError):
    """A file that cannot be read as what it should be. The text names the file and the line."""


class UnsupportedModel(HeadwaterError):
    """The model cannot run with this cache; the text names the layer and the reason."""


class UnsupportedCall(HeadwaterError):
    """The model was called in a way that cannot work with this cache; the text says what would."""


class CacheStateError(HeadwaterError):
    """What was passed contradicts what the cache holds."""


class ContextFull(HeadwaterError):
    """A stream that never evicts has no room for the tokens it was given."""


class OverCapacity(HeadwaterError, RuntimeError):
    """A policy was driven past the budget it was built for."""


class PolicyFault(HeadwaterError):
    """A policy broke its contract; the text names the policy, the step and the position."""


class StoreError(HeadwaterError):
    """The user's database cannot be read or written; the text names the file, the reason and what to do."""


class SessionBusy(StoreError):
    """Another process has this session open; the text says which."""


class SnapshotError(HeadwaterError):
    """A snapshot of a cache that cannot be used; the text says why."""


class MemoryFault(HeadwaterError):
    """What was said cannot be kept or found again; the text says why. A chat goes on without."""


class TraceNotStored(HeadwaterError):
    """The disk would not take a recording; the text says what is there, what stays readable and how to go on."""


class MissingExtra(HeadwaterError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed; run: pip install 'headwater[{extra}]'")


class UnsupportedVersion(HeadwaterError):
    """A dependency is installed in a release outside the tested range; the text says the range and the command."""


class ModelMissing(HeadwaterError):
    """A model is not on this machine; the text gives the command that brings it."""


class ModelFileError(HeadwaterError):
    """A model's files cannot be had, trusted, converted, stored or read; the text says why and what to do."""
