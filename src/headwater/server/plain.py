"""One request to continue a text, without turns or a session.

Knows in what order things happen. Does not know HTTP, nor who else is waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.chat.continuing import Continuation
from headwater.chat.due import Due
from headwater.chat.sampling import Sampling
from headwater.chat.session import PIECE
from headwater.engines.base import Engine
from headwater.errors import ContextFull
from headwater.server.job import Asked, Done, Failed, Job, Piece, Reason, Watcher, Work
from headwater.server.sessions import Manner


@dataclass(slots=True, eq=False, kw_only=True)
class PlainJob(Job):
    """A text to go on from."""

    engine: Engine
    manner: Manner
    text: str
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()

    def run(self) -> Work:
        self.started = self.clock()
        watch = Watcher(self.engine, None)
        try:
            text = Continuation(
                self.engine,
                self.text,
                policy=self.manner.policy,
                sampling=self.sampling,
                max_tokens=self.max_tokens,
                stop=self.stop,
                watch=watch,
            )
            steps = text.steps(PIECE)
            reason: Reason | None = None
            asked = False
            try:
                for said in steps:
                    if not asked and watch.surprise is not None:
                        asked = True
                        self.emit(_asked(text.prompt_tokens))
                    if isinstance(said, str) and said:
                        self.emit(Piece(text=said))
                    if (reason := self.over) is not None:
                        break
                    if isinstance(said, Due):
                        yield said
            except ContextFull:
                if not text.tokens:
                    raise
                reason = "length"
            finally:
                steps.close()
        except Exception as error:
            self.emit(Failed(error=error))
            return
        if not asked:
            self.emit(_asked(text.prompt_tokens))
        if reason is None:
            reason = "stop" if text.finished else "length"
        self.emit(Done(reason=reason, tokens=text.tokens, stats=None, surprise=watch.surprise))


def _asked(tokens: int) -> Asked:
    return Asked(session="", conversation="", how="new", turn=0, fed=tokens, held=tokens, prompt_tokens=tokens)
