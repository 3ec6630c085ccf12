"""A chat that never ends: messages in, pieces of answers out, in a fixed budget.

Knows turns, sampling, stop conditions and what to tell the user. Does not know which runtime it drives, nor how room is
made (`conversation`) or text is cut into pieces (`reader`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headwater.chat.conversation import Conversation
from headwater.chat.interrupts import whole_step
from headwater.chat.ledger import Gone, Turn
from headwater.chat.reader import Reader, checked_stops
from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.stats import Stats, picture
from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.errors import CacheStateError, ContextFull, UsageError
from headwater.policies import Policy
from headwater.policies import policy as make_policy


@dataclass(slots=True, kw_only=True)
class _Answer:
    """An answer while it is being generated.

    `pending` was drawn and shown, but not fed yet; `asked` and `before` are what had left the cache before its message,
    and before itself.
    """

    reader: Reader
    start: int
    asked: Gone
    before: Gone
    logits: NDArray[np.float32]
    pending: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    busy_s: float = 0.0
    finished: bool = False

    def show(self, piece: str) -> str:
        self.text += piece
        return piece


class Chat:
    """A conversation with a model in a fixed budget.

    The system prompt is pinned with the sinks (under policies that pin). Whole turns leave oldest first, a message
    together with its answer; only a turn larger than the whole window is cut. `messages` keeps everything that was
    said.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        policy: Policy[Any],
        system: str | None = None,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
        stop: Sequence[str] | str = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise UsageError(f"max_tokens must be an integer of at least 1, got {max_tokens!r}")
        self.engine, self.policy, self.max_tokens = engine, policy, max_tokens
        self.sampling = sampling if sampling is not None else Sampling()
        self.stop = checked_stops(stop)
        self._clock = clock
        self._owned = False
        self._closed = False
        self._begin(system, notice=None)

    @classmethod
    def open(
        cls,
        model: str | Engine = "smollm2",
        *,
        engine: str = "transformers",
        system: str | None = None,
        budget: int | None = None,
        sinks: int | None = None,
        policy: str | Policy[Any] = "streaming-llm",
        sampling: Sampling | None = None,
        max_tokens: int = 512,
        stop: Sequence[str] | str = (),
        template: str | None = None,
    ) -> Self:
        """Load a model by name (or take an engine as it is) and begin a conversation.

        `budget` is the most tokens held (default 1024) and `sinks` the first tokens that a policy pins (default: the
        policy's own); both belong to a policy given by name. `template` is a chat template as text, for models without
        one. Raises UsageError and its kinds for values that do not fit, ModelMissing, UnsupportedModel for a template
        that cannot be used.
        """
        made = _policy(policy, budget, sinks)
        checked_stops(stop)
        if isinstance(model, Engine):
            if template is not None:
                raise UsageError("an engine that is open already has its template; give it to the engine when loading")
            return cls(model, policy=made, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop)
        options = {} if template is None else {"template": template}
        loaded = open_engine(model, engine=engine, **options)
        try:
            chat = cls(loaded, policy=made, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop)
        except BaseException:
            loaded.close()
            raise
        chat._owned = True
        return chat

    # Talking.

    def send(self, text: str) -> Iterator[str]:
        """Say something; the answer comes in pieces of whole characters, as it is generated.

        The answer ends with the model's end of turn, before a stop string, or after `max_tokens` tokens. A caller that
        stops listening (closing the iterator, Ctrl-C, or the next `send`) ends it there; what was said so far stays. An
        answer that ran into the end of a cache that never evicts stays too, and ContextFull is raised after its last
        piece.

        Raises UsageError for a message that is empty, all white space, or holds lone surrogates. A NUL is a character
        like any other.
        """
        self._check_open()
        if not text.strip():
            raise UsageError("the message is empty; type something")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the message is not valid text: character {error.start + 1} is a lone surrogate, {text[error.start]!r}"
            ) from error
        return self._converse(text)

    def _converse(self, text: str) -> Iterator[str]:
        self._check_open()
        self._end_answer()
        began = self._clock()
        answer: _Answer | None = None
        try:
            self._ask(text)
            answer = self._answer
            while answer is not None and answer is self._answer:
                piece, over = self._next(answer)
                if answer.tokens <= 1:
                    self._ttft_s = self._clock() - began
                if piece:
                    yield piece
                if over:
                    break
        finally:
            if answer is None or answer is self._answer:
                self._end_answer()

    def _ask(self, text: str) -> None:
        """Feed a message, from making room for it to the opened answer."""
        talk = self._talk
        talk.check_in_step()
        question = talk.template.question(self.engine, text, first=not talk.ledger.turns)
        if not talk.fits(len(question) + 1 + len(talk.template.answer_close)):
            raise ContextFull(f"the message takes {len(question)} tokens and {self._full()}")
        with whole_step():
            before, start = talk.gone, len(talk.ledger)
            logits = talk.feed(question)
            talk.add_turn("user", text, start=start, before=before)
            self._tell(talk.gone.since(before))
            reader = Reader(self.engine.decode, self.stop)
            self._answer = _Answer(reader=reader, start=len(talk.ledger), asked=before, before=talk.gone, logits=logits)

    def _next(self, answer: _Answer) -> tuple[str, bool]:
        """One step: feed what was drawn before, draw, read. The piece of text, and whether the answer is over."""
        talk, began = self._talk, self._clock()
        with whole_step():
            if answer.pending:
                answer.logits = talk.feed(answer.pending)
                answer.pending = []
            if not talk.fits(1 + len(talk.template.answer_close)):
                raise ContextFull(f"the answer was cut: {self._full()}")
            token = self._sampler.draw(answer.logits, talk.held_ids() if self._sampler.wants_context else ())
            if token in self.engine.stop_tokens:
                answer.finished = True
                return answer.show(answer.reader.flush()), True
            answer.pending = [token]
            answer.tokens += 1
            piece = answer.reader.push(token)
            answer.finished = answer.reader.stopped
            over = answer.finished or answer.tokens == self.max_tokens
            if over:
                piece += answer.reader.flush()
            if answer.tokens > 1:
                answer.busy_s += self._clock() - began
                self._tokens_per_s = (answer.tokens - 1) / answer.busy_s if answer.busy_s > 0 else None
            return answer.show(piece), over

    def _end_answer(self) -> None:
        """Close the answer being generated, if there is one, so that the next message can follow."""
        answer = self._answer
        if answer is None:
            return
        talk = self._talk
        with whole_step():
            self._answer = None
            answer.show(answer.reader.flush())
            if answer.reader.surplus:
                answer.pending = []
                talk.take_back(answer.reader.surplus - 1)
            try:
                talk.feed([*answer.pending, *talk.template.answer_close])
            finally:
                self._keep(answer)

    def _keep(self, answer: _Answer) -> None:
        """Write the answer down as a turn."""
        self._talk.add_turn(
            "assistant", answer.text, start=answer.start, before=answer.before, finished=answer.finished
        )
        self._tell(self._talk.gone.since(answer.asked))

    def _full(self) -> str:
        talk = self._talk
        return (
            f"{len(talk.ledger)} of {talk.limit_tokens} are used, which {self.policy.name} never frees; start over "
            "with reset(), raise the budget, or use streaming-llm"
        )

    # Looking.

    @property
    def system(self) -> str | None:
        """The system prompt; None leaves it to the model's template."""
        return self._talk.system

    @property
    def pinning(self) -> str:
        """What is pinned, in words."""
        talk = self._talk
        if not talk.pins:
            return "nothing pinned"
        head = f"prompt {len(talk.template.head)}, " if talk.template.head else ""
        return f"pinned {talk.pins} ({head}sinks {talk.sinks})"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn so far, with its place in the stream and what left to make room for it."""
        return tuple(self._talk.ledger.turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Everything that was said, both sides, whether the cache still holds it or not."""
        said = [{"role": turn.role, "content": turn.text} for turn in self._talk.ledger.turns]
        return said if self.system is None else [{"role": "system", "content": self.system}, *said]

    def stats(self) -> Stats:
        """The numbers of this moment."""
        talk, closed = self._talk, self._closed
        return Stats(
            seen=len(talk.ledger),
            held=0 if closed else talk.stream.held,
            budget=talk.budget,
            pinned=0 if closed else min(talk.pins, talk.stream.held),
            turns=len(talk.ledger.turns),
            evicted_turns=len(talk.ledger.turns) if closed else talk.gone.turns,
            evicted_tokens=len(talk.ledger) if closed else talk.gone.tokens,
            cache_bytes=talk.stream.nbytes,
            tokens_per_s=self._tokens_per_s,
            ttft_s=self._ttft_s,
            notice=self._notice,
        )

    def map(self, width: int = 60) -> str:
        """The cache as a line of `width` characters: sinks, pinned prompt, window, room (see `stats.LEGEND`)."""
        now = self.stats()
        sinks = min(self._talk.sinks, now.pinned)
        return picture(
            width,
            sinks=sinks,
            pinned=now.pinned - sinks,
            window=now.held - now.pinned,
            room=max(0, now.budget - now.held),
        )

    # Starting over.

    def reset(self) -> None:
        """Begin a new conversation with the same system prompt and seed; the old one is forgotten."""
        self.set_system(self.system, notice="started a new conversation")

    def set_system(
        self, system: str | None, *, notice: str = "started a new conversation with this system prompt"
    ) -> None:
        """Begin a new conversation with another system prompt. One that is refused leaves the old one as it was."""
        self._check_open()
        before = self._talk
        self._begin(system, notice=notice)
        before.close()

    def close(self) -> None:
        """Give the cache back, and the model when `open` loaded it. What was said can still be read."""
        if self._closed:
            return
        if self._answer is not None:
            self._keep(self._answer)
            self._answer = None
        self._closed = True
        self._talk.close()
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, system: str | None, *, notice: str | None) -> None:
        self._talk = Conversation(self.engine, self.policy, system)
        self._sampler = Sampler(self.sampling)
        self._answer: _Answer | None = None
        self._notice = notice
        self._ttft_s: float | None = None
        self._tokens_per_s: float | None = None

    def _check_open(self) -> None:
        if self._closed:
            raise CacheStateError("this chat is closed; open a new one")

    def _tell(self, gone: Gone) -> None:
        """Keep a notice of what left the cache."""
        if not gone.tokens:
            return
        whole = f"{gone.turns} turn{'s' * (gone.turns != 1)}" if gone.turns else "part of a turn"
        prompt = ", the system prompt among them," if self._talk.prompt_left else ""
        self._notice = f"{whole} ({gone.tokens} tokens){prompt} left the cache"


def _policy(choice: str | Policy[Any], budget: int | None, sinks: int | None) -> Policy[Any]:
    given = {name: value for name, value in (("budget", budget), ("sinks", sinks)) if value is not None}
    if isinstance(choice, str):
        given.setdefault("budget", 1024)
    return make_policy(choice, **given)
