"""What a chat is made of, brought together: engine, session, memory; and given back when it cannot begin.

Knows who owns what. Does not know how a chat works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from headwater.chat.keeper import Keeper
from headwater.chat.settings import Settings
from headwater.chat.store import Opened
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.engines.default import default_engine
from headwater.errors import UsageError
from headwater.memory.base import Remembers
from headwater.memory.memory import Memory


@dataclass(slots=True, kw_only=True)
class Parts:
    """`loaded` and `own_memory` were made for this chat and are closed with it."""

    settings: Settings
    engine: Engine
    loaded: Engine | None
    keeper: Keeper | None
    memory: Remembers | None
    own_memory: Memory | None

    def close(self) -> None:
        """Give back what was made for the chat."""
        for part in (self.own_memory, self.loaded):
            if part is not None:
                part.close()


def prepare(
    opened: Opened | None,
    model: str | Engine | None,
    *,
    system: str | None = None,
    memory: Remembers | bool = False,
    **given: Any,
) -> Parts:
    """The parts of a chat in a session that was taken for it, or in none; `given` is what `Settings.of` takes.

    Raises what the parts raise, with everything given back, the session too.
    """
    loaded: Engine | None = None
    own: Memory | None = None
    try:
        stored = {} if opened is None else opened.journal.settings
        settings = Settings.of(stored, model=None if isinstance(model, Engine) else model, **given)
        if isinstance(model, Engine):
            if given.get("template") is not None:
                raise UsageError("an engine that is open already has its template; give it to the engine when loading")
            settings, engine = settings.named(model.name), model
        else:
            if not stored and given.get("engine") is None:
                settings = settings.on(default_engine(settings.model, settings.policy))
            options = {} if settings.template is None else {"template": settings.template}
            engine = loaded = open_engine(settings.model, engine=settings.engine, **options)
        keeper = None if opened is None else Keeper(opened, settings, system, clock=time.monotonic)
        if memory is True:
            own = Memory(None if opened is None else opened.journal.path)
        return Parts(
            settings=settings,
            engine=engine,
            loaded=loaded,
            keeper=keeper,
            memory=own if isinstance(memory, bool) else memory,
            own_memory=own,
        )
    except BaseException:
        for part in (own, loaded, opened):
            if part is not None:
                part.close()
        raise
