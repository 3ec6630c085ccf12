"""A chat that never ends: messages in, pieces of answers out, in a fixed budget.

Knows turns, sampling, stop conditions and what to tell the user. Does not know which runtime it drives, nor how room is
made (`conversation`) or text is cut into pieces (`reader`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from headwater.chat.answer import Answer, Watch
from headwater.chat.conversation import Conversation
from headwater.chat.due import Due, Steps, driven
from headwater.chat.interrupts import whole_step
from headwater.chat.keeper import Keeper
from headwater.chat.ledger import Gone, Turn
from headwater.chat.notes import Note
from headwater.chat.opening import Parts, prepare
from headwater.chat.reader import check_message, check_text, checked_stops
from headwater.chat.recalling import ALLOWANCE, MOST
from headwater.chat.reminders import Wanted
from headwater.chat.resume import TakenUp
from headwater.chat.sampling import Sampler, Sampling
from headwater.chat.settings import MAX_TOKENS
from headwater.chat.stats import Stats, picture
from headwater.chat.store import Opened, opened_session
from headwater.engines.base import Engine
from headwater.errors import CacheStateError, ContextFull, HeadwaterError, StoreError, UsageError
from headwater.memory.base import Recalled, Remembers
from headwater.policies import Policy

PIECE = 128
"""Tokens of a message that go through the model in one step, where others wait."""


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
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        clock: Callable[[], float] = time.perf_counter,
        keeper: Keeper | None = None,
        memory: Remembers | None = None,
        memory_tokens: int = ALLOWANCE,
        summary_tokens: int = 0,
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise UsageError(f"max_tokens must be an integer of at least 1, got {max_tokens!r}")
        self.engine, self.policy, self.max_tokens = engine, policy, max_tokens
        self.sampling = sampling if sampling is not None else Sampling()
        self.stop = checked_stops(stop)
        self._clock = clock
        self._parts: Parts | None = None
        self._closed = False
        self._keeper = keeper
        self._wanted = Wanted(memory=memory, memory_tokens=memory_tokens, summary_tokens=summary_tokens)
        taken = keeper.resume(engine, policy) if keeper is not None else None
        if taken is None:
            self._begin(system, notice=None)
        else:
            self._take_up(taken)

    @classmethod
    def open(
        cls,
        model: str | Engine | None = None,
        *,
        session: str | Path | Opened | None = None,
        engine: str | None = None,
        system: str | None = None,
        budget: int | None = None,
        sinks: int | None = None,
        policy: str | Policy[Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | str | None = None,
        template: str | None = None,
        memory: Remembers | bool = False,
        memory_tokens: int = ALLOWANCE,
        summary_tokens: int = 0,
    ) -> Self:
        """Load a model by name (or take an engine as it is) and begin a conversation, or go on with a session.

        `model` is `smollm2` by default, `policy` streaming-llm; `budget` is the most tokens held (1024) and `sinks` the
        first tokens that a policy pins (the policy's own); both belong to a policy given by name. `max_tokens` (512) is
        the longest answer. `template` is a chat template as text, for models without one.

        `session` is a name, of a conversation that is kept on the disk and goes on where it ended, a Path of a file
        that holds one, or what `Store.open` gave. What is left out is as the session had it, and a mapping as
        `sampling` changes what it names; another policy or budget makes the cache again from the journal; another
        model or system prompt is refused.

        `memory` keeps what leaves the cache and brings what has to do with a message, in up to `memory_tokens` just
        before it: True is `headwater.Memory` in the session's file, or a private one, and any object with the methods
        of `headwater.memory.Remembers` will do. What it brings leaves with the message it came with.

        `summary_tokens`, above 0, lets the model write two lines on every lot of turns that left, in `idle`; the latest
        that fit in so many tokens stay in the cache: they go before a message whenever they have left or are outdated.

        Raises UsageError and its kinds for values that do not fit, ModelMissing, UnsupportedModel for a template
        that cannot be used, SessionBusy while another process has the session, StoreError when it cannot be read.
        """
        opened = None if session is None else opened_session(session)
        return cls._with(
            opened,
            model,
            engine=engine,
            system=system,
            budget=budget,
            sinks=sinks,
            policy=policy,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            template=template,
            memory=memory,
            memory_tokens=memory_tokens,
            summary_tokens=summary_tokens,
        )

    @classmethod
    def restore(cls, session: str | Path, model: Engine | None = None) -> Self:
        """Go on with a session as it was; `model` is an engine to take instead of loading the session's.

        Raises UnknownName where there is none of that name, and what `open` raises.
        """
        return cls._with(opened_session(session, create=False), model)

    @classmethod
    def _with(
        cls,
        opened: Opened | None,
        model: str | Engine | None,
        *,
        memory_tokens: int = ALLOWANCE,
        summary_tokens: int = 0,
        **given: Any,
    ) -> Self:
        """A chat in a session that was taken for it, or in none."""
        parts = prepare(opened, model, **given)
        settings = parts.settings
        try:
            chat = cls(
                parts.engine,
                policy=settings.policy,
                system=given.get("system"),
                sampling=settings.sampling,
                max_tokens=settings.max_tokens,
                stop=settings.stop,
                keeper=parts.keeper,
                memory=parts.memory,
                memory_tokens=memory_tokens,
                summary_tokens=summary_tokens,
            )
        except BaseException:
            parts.close()
            if opened is not None:
                opened.close()
            raise
        chat._parts = parts
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
        check_message(text)
        return self._pieces(text)

    def _pieces(self, text: str) -> Iterator[str]:
        yield from filter(None, driven(self._converse(text, None, None)))

    def steps(self, text: str, *, piece: int = PIECE, watch: Watch | None = None) -> Steps:
        """As `send`, for one who drives several: yields what has to be fed before it goes on (`Due`), and a piece of
        text, which may be empty, for every token.

        A message goes in `piece` tokens at a time; one that nobody waits for any more is fed to its end all the same.
        `watch` is shown what every token was drawn from.
        """
        self._check_open()
        check_message(text)
        return self._converse(text, piece, watch)

    def _converse(self, text: str, piece: int | None, watch: Watch | None) -> Steps:
        self._check_open()
        self._end_answer()
        began = self._clock()
        answer: Answer | None = None
        try:
            yield from self._ask(text, piece, watch)
            answer = self._answer
            while answer is not None and answer is self._answer:
                if (due := answer.due) is not None:
                    yield due
                said, over = answer.step()
                self._tokens_per_s = answer.tokens_per_s
                if answer.tokens <= 1:
                    self._ttft_s = self._clock() - began
                yield said
                if over:
                    break
        finally:
            if answer is None or answer is self._answer:
                self._end_answer()

    def _ask(self, text: str, piece: int | None, watch: Watch | None) -> Generator[Due, None, None]:
        """Feed a message, from making room for it to the opened answer."""
        talk = self._talk
        talk.check_in_step()
        before_it = self._reminders.bring(text, talk)
        first = not talk.ledger.turn_count
        question = talk.template.question(self.engine, before_it + text, first=first)
        if not talk.fits(len(question) + 1 + len(talk.template.answer_close)):
            raise ContextFull(f"the message takes {len(question)} tokens and {talk.full}")
        before, start = talk.gone, len(talk.ledger)
        dues = talk.dues(question, piece or len(question))
        try:
            for due in dues:
                yield due
                due.result()
        except GeneratorExit:
            pass  # half a message would be nobody's: the rest is fed below
        with whole_step():
            for due in dues:
                if not due.fed:
                    due.feed()
                    due.result()
            talk.add_turn("user", text, start=start, before=before)
            self._write_down(**self._reminders.brought)
            self._tell(talk.gone.since(before))
            self._answer = Answer(
                self.engine,
                talk,
                self._sampler,
                dues[-1].result(),
                asked=before,
                stop=self.stop,
                max_tokens=self.max_tokens,
                clock=self._clock,
                watch=watch,
            )

    def _end_answer(self) -> None:
        """Close the answer being generated, if there is one, so that the next message can follow."""
        answer = self._answer
        if answer is None:
            return
        with whole_step():
            self._answer = None
            try:
                answer.close()
            finally:
                self._keep(answer)
            self._reminders.keep(self._talk)
            if self._keeper is not None:
                self._keeper.rest(self._talk)

    def _keep(self, answer: Answer) -> None:
        """Write the answer down as a turn."""
        self._answer_tokens = answer.tokens
        self._talk.add_turn(
            "assistant", answer.text, start=answer.start, before=answer.before, finished=answer.finished
        )
        self._write_down(
            closing=answer.closing,
            tokens=answer.tokens,
            ttft_s=self._ttft_s,
            tokens_per_s=self._tokens_per_s,
            sampling=asdict(self.sampling),
        )
        self._tell(self._talk.gone.since(answer.asked))

    def _write_down(self, **details: Any) -> None:
        """The newest turn into the journal, with where the sampler is now."""
        if self._keeper is not None:
            self._keeper.turn(self._talk, {"sampler": self._sampler.state, **self._reminders.progress, **details})

    def idle(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Do what can be done while nobody waits for an answer: the model's notes on what left, when the chat was
        opened with `summary_tokens`. It ends when all is done, or within a step of the model after `stop` says so, and
        goes on the next time; returns whether all is done. An answer under way ends first.

        The terminal calls it while the user types. No other call of the chat may run meanwhile.
        """
        self._check_open()
        self._end_answer()
        return self._reminders.idle(self._talk, stop)

    # Looking.

    @property
    def system(self) -> str | None:
        """The system prompt; None leaves it to the model's template."""
        return self._talk.system

    @property
    def session(self) -> str | None:
        """The name of the session that keeps it, if one does."""
        return None if self._keeper is None else self._keeper.name

    @property
    def conversation(self) -> str | None:
        """What tells this conversation of the session from all others; None without a session."""
        return None if self._keeper is None else self._keeper.conversation

    @property
    def pinning(self) -> str:
        """What is pinned, in words."""
        talk = self._talk
        if not talk.pins:
            return "nothing pinned"
        head = f"prompt {len(talk.template.head)}, " if talk.template.head else ""
        return f"pinned {talk.pins} ({head}sinks {talk.sinks})"

    @property
    def latest(self) -> Turn | None:
        """The newest turn, if there is one here; `turns` may have to read the session for the others."""
        return self._talk.ledger.turns[-1] if self._talk.ledger.turns else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn so far, with its place in the stream and what left to make room for it."""
        earlier = () if self._keeper is None else self._keeper.earlier(0, self._talk.ledger.past_turns)
        return (*earlier, *self._talk.ledger.turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Everything that was said, both sides, whether the cache still holds it or not."""
        said = [{"role": turn.role, "content": turn.text} for turn in self.turns]
        return said if self.system is None else [{"role": "system", "content": self.system}, *said]

    def stats(self) -> Stats:
        """The numbers of this moment."""
        talk, closed = self._talk, self._closed
        return Stats(
            seen=len(talk.ledger),
            held=0 if closed else talk.stream.held,
            budget=talk.budget,
            pinned=0 if closed else min(talk.pins, talk.stream.held),
            turns=talk.ledger.turn_count,
            evicted_turns=talk.ledger.turn_count if closed else talk.gone.turns,
            evicted_tokens=len(talk.ledger) if closed else talk.gone.tokens,
            cache_bytes=talk.stream.nbytes,
            tokens_per_s=self._tokens_per_s,
            ttft_s=self._ttft_s,
            notice=self._notice,
            trouble="; ".join(each.trouble for each in (self._keeper, self._reminders) if each and each.trouble)
            or None,
            recalled=self._reminders.told,
            fed=talk.fed,
            sinks=0 if closed else min(talk.sinks, talk.stream.held),
            answer_tokens=self._answer_tokens,
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

    def recall(self, text: str, *, limit: int = MOST) -> list[Recalled]:
        """What memory would bring for a text, best first. Raises UsageError without memory, what the memory raises."""
        self._check_open()
        recaller = self._reminders.recaller
        if recaller is None:
            raise UsageError("this chat has no memory; open it with memory=True")
        recaller.keep(self._talk)
        return recaller.look(text, self._talk, limit=limit)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The model's notes on what left, oldest first; empty without `summary_tokens`."""
        return () if self._reminders.notes is None else tuple(self._reminders.notes.written)

    # Another course.

    def draw_by(self, sampling: Sampling) -> None:
        """Draw by other rules from the next answer on, with a generator of its own."""
        self._check_open()
        self._end_answer()
        self.sampling, self._sampler = sampling, Sampler(sampling)

    def hear(self, question: str, answer: str) -> None:
        """Take an exchange that was had elsewhere into the conversation. Raises as `send` does for the texts."""
        self._check_open()
        self._end_answer()
        for text in (question, answer):
            check_text(text)
        talk = self._talk
        talk.check_in_step()
        asked = talk.template.question(self.engine, question, first=not talk.ledger.turn_count)
        answered = [*self.engine.encode(answer), *talk.template.answer_close]
        if not talk.fits(len(asked) + len(answered)):
            raise ContextFull(f"the exchange takes {len(asked) + len(answered)} tokens and {talk.full}")
        with whole_step():
            for role, text, ids in (("user", question, asked), ("assistant", answer, answered)):
                before, start = talk.gone, len(talk.ledger)
                talk.feed(ids)
                talk.add_turn(role, text, start=start, before=before)
                self._write_down(closing=len(ids))
                self._tell(talk.gone.since(before))
            self._reminders.keep(talk)

    def take_back(self, exchanges: int, *, again: bool = False) -> bool:
        """Forget the newest messages with their answers, exactly, as if they had never been said.

        False, with nothing changed, when something left the cache for them; `again` makes the cache of a session again
        from its journal then. In a session they stay in the journal, in the conversation as it was. Raises UsageError
        for more than there are, StoreError, with nothing changed, when the disk does not take it.
        """
        self._check_open()
        self._end_answer()
        talk = self._talk
        talk.check_in_step()
        if not 0 < exchanges <= talk.ledger.turn_count // 2:
            raise UsageError(f"there are {talk.ledger.turn_count // 2} exchanges, so {exchanges} cannot be taken back")
        turns = talk.ledger.turns
        with whole_step():
            taken = turns[-2 * exchanges :] if 2 * exchanges <= len(turns) else []
            ids = talk.ledger.between(taken[0].start, len(talk.ledger)) if taken else ()
            if not taken or not talk.take_back(len(ids)):
                return again and self._make_again(talk.ledger.turn_count - 2 * exchanges)
            del turns[-2 * exchanges :]
            try:
                if self._keeper is not None:
                    self._keeper.branch(talk.ledger.turn_count)
            except BaseException:
                talk.feed(ids)
                turns.extend(taken)
                raise
            before, self._reminders = self._reminders, self._wanted.begin(self.engine, self._keeper)
            self._reminders.follow(before, len(talk.ledger))
        return True

    def _make_again(self, turns: int) -> bool:
        """Read the first turns again from the journal, as far as they are held; False where there is none."""
        before, keeper = self._talk, self._keeper
        if keeper is None:
            return False
        keeper.branch(turns)
        if (taken := keeper.resume(self.engine, self.policy)) is not None:
            taken.talk.fed += before.fed
            self._take_up(taken)
            before.close()
        return True

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

    def save(self) -> None:
        """Write what the cache holds to the session's snapshot now, and wait until it is on the disk.

        It is done anyway after some turns and on `close`; the messages themselves are written with every turn. An
        answer under way ends here. Raises UsageError without a session, StoreError when the disk does not take it.
        """
        self._check_open()
        if self._keeper is None:
            raise UsageError("this chat has no session to save; open it with session=NAME")
        self._end_answer()
        self._keeper.save(self._talk)
        if (trouble := self._keeper.trouble) is not None:
            raise StoreError(trouble)

    def close(self) -> None:
        """Give the cache back, and the model when `open` loaded it. What was said can still be read.

        A session is saved first. Raises StoreError, with everything closed, when messages of it could not be written.
        """
        if self._closed:
            return
        try:
            self._leave()
        finally:
            self._closed = True
            self._reminders.close()
            self._talk.close()
            if self._parts is not None:
                self._parts.close()

    def _leave(self) -> None:
        """End the answer under way, and give the session back."""
        if self._keeper is None:
            if self._answer is not None:
                self._keep(self._answer)
                self._answer = None
            return
        whole = None
        try:
            self._end_answer()
            self._talk.check_in_step()
            whole = self._talk
        except HeadwaterError as error:
            self._notice = f"the cache was not saved: {error}"
        finally:
            self._keeper.close(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, system: str | None, *, notice: str | None) -> None:
        read = None if self._keeper is None else self._keeper.prefixes.open
        talk = Conversation.begin(self.engine, self.policy, system, read=read)
        if self._keeper is not None:
            talk.fed += self._keeper.prefixes.computed
        try:
            self._wanted.check(talk.frame)
        except BaseException:
            talk.close()
            raise
        self._start(talk, notice)
        if self._keeper is not None:
            self._keeper.begin(self._talk, self.engine)
        self._reminders = self._wanted.begin(self.engine, self._keeper)

    def _take_up(self, taken: TakenUp) -> None:
        """Go on where a session ended. A question that was never answered gets an answer that is empty."""
        self._wanted.check(taken.talk.frame)
        self._start(taken.talk, "; ".join(taken.said) or None)
        self._reminders = self._wanted.begin(self.engine, self._keeper)
        if self._keeper is not None:
            self._reminders.take_up(self._keeper, taken)
        if taken.entry is None or self._keeper is None:
            return
        if self._keeper.same_seed and (state := taken.entry.details.get("sampler")) is not None:
            self._sampler.state = state
        if taken.unanswered:
            talk = self._talk
            before, start = talk.gone, len(talk.ledger)
            talk.feed(talk.template.answer_close)
            talk.add_turn("assistant", "", start=start, before=before, finished=False)
            self._write_down(closing=len(talk.template.answer_close), tokens=0)
            lost = f"the last message got no answer before the program ended: {taken.entry.turn.text[:60]!r}"
            self._notice = "; ".join(text for text in (self._notice, lost) if text)

    def _start(self, talk: Conversation, notice: str | None) -> None:
        self._talk = talk
        self._sampler = Sampler(self.sampling)
        self._answer: Answer | None = None
        self._notice = notice
        self._ttft_s: float | None = None
        self._tokens_per_s: float | None = None
        self._answer_tokens = 0

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
