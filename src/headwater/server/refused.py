"""Errors as a client is told them: one table from the project's exceptions to a status and a kind.

Knows the shape of OpenAI's errors. Does not know what went wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headwater.errors import (
    BudgetError,
    ContextFull,
    HeadwaterError,
    MissingExtra,
    SessionBusy,
    StoreError,
    UnknownName,
    UnsupportedCall,
    UsageError,
)
from headwater.server.sessions import NoRoom, OtherHistory, TooManySessions


class Refused(Exception):
    """A request that is not answered. `param` is the field that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As it goes over the wire."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refusal(error: Exception) -> Refused:
    """What a client is told of an error. The text of one that nobody expected stays here."""
    if isinstance(error, Refused):
        return error
    text = str(error)
    if isinstance(error, OtherHistory):
        return Refused(409, text, code="session_history_differs", param="messages")
    if isinstance(error, TooManySessions):
        return Refused(429, text, kind="rate_limit_exceeded", code="too_many_sessions")
    if isinstance(error, (ContextFull, BudgetError)):
        return Refused(400, text, code="context_length_exceeded", param="messages")
    if isinstance(error, UnknownName):
        return Refused(404, text, code=f"{error.kind.replace(' ', '_')}_not_found")
    if isinstance(error, (UsageError, UnsupportedCall)):
        return Refused(400, text)
    if isinstance(error, SessionBusy):
        return Refused(409, text, code="session_busy")
    if isinstance(error, MissingExtra):
        return Refused(501, text, kind="server_error", code="extra_missing")
    if isinstance(error, (StoreError, NoRoom)):
        return Refused(503, text, kind="server_error", code="store_unavailable", headers={"retry-after": "5"})
    if isinstance(error, HeadwaterError):
        return Refused(500, text, kind="server_error")
    return Refused(500, "the server failed at this request; its log says where", kind="server_error")


def too_much(message: str, wait_s: float) -> Refused:
    """A limit of the key was reached."""
    return Refused(
        429,
        message,
        kind="rate_limit_exceeded",
        code="rate_limit_exceeded",
        headers={"retry-after": str(max(1, math.ceil(wait_s)))},
    )


def place_of(error: Exception) -> str:
    """Where it was raised; its text may hold what was said."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown place" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
