"""Sessions on the fake engine: long past the window, and through everything that can go wrong in one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine, FakeStream
from headwater.errors import (
    BudgetError,
    CacheStateError,
    ContextFull,
    UnknownName,
    UnsupportedCall,
    UnsupportedModel,
    UsageError,
)
from headwater.policies import POLICIES
from headwater.policies.sliding_window import SlidingWindow
from headwater.policies.streaming_llm import StreamingLLM

SYSTEM = "You are brief."
GREEDY = Sampling(temperature=0)
MESSAGES = ["hi", "how are you?", "tell me more about it", "and then what happened to the boat?", "é🙂 日本", "  ok  "]


def opened(engine: Engine | None = None, **options: Any) -> Chat:
    return Chat.open(engine or FakeEngine(), **{"budget": 160, "system": SYSTEM, "sampling": GREEDY, **options})


def said(chat: Chat, text: str = "hi") -> str:
    return "".join(chat.send(text))


def stream_of(chat: Chat) -> FakeStream:
    stream = chat._talk.stream
    assert isinstance(stream, FakeStream)
    return stream


def check_step(chat: Chat) -> None:
    """What must hold between any two steps: ledger and stream agree, the budget holds, the prompt is there."""
    talk, stream = chat._talk, stream_of(chat)
    assert stream.seen == len(talk.ledger)
    assert stream.tokens == np.array(talk.ledger.ids)[stream.kept].tolist() == talk.held_ids().tolist()
    assert stream.held <= chat.stats().budget
    if talk.pins:
        assert stream.kept[: len(talk.template.head)].tolist() == list(range(len(talk.template.head)))


def check_whole_turns(chat: Chat) -> None:
    """The oldest thing held beside the pins is the beginning of a message, or what the sinks left of the first."""
    talk = chat._talk
    assert talk.first in {turn.start for turn in chat.turns if turn.role == "user"} | {talk.pins}


def check_turns(chat: Chat) -> None:
    """Turns follow one another without a gap, user and assistant in turn."""
    place = len(chat._talk.template.head)
    for index, turn in enumerate(chat.turns):
        assert turn.role == ("user", "assistant")[index % 2]
        assert turn.start == place < turn.stop
        place = turn.stop
        if turn.role == "assistant" and not chat.stop:
            assert chat.engine.decode(chat._talk.ledger.ids[turn.start : turn.stop]) == turn.text + "\n"
    assert place == len(chat._talk.ledger)


# A long conversation.


@pytest.mark.parametrize("policy", ["streaming-llm", "sliding-window"])
@pytest.mark.parametrize("system", [SYSTEM, None])
def test_hundreds_of_turns_past_the_window(policy: str, system: str | None):
    chat = opened(policy=policy, system=system, budget=260)
    for index in range(300):
        for _ in chat.send(MESSAGES[index % len(MESSAGES)]):
            check_step(chat)
            check_whole_turns(chat)
        check_step(chat)
        check_turns(chat)
    stats = chat.stats()
    assert stats.turns == len(chat.turns) == 600
    assert stats.seen > 40 * stats.budget
    assert stats.evicted_tokens == stats.seen - stats.held
    assert 560 < stats.evicted_turns < 600
    assert stats.evicted_turns == sum(turn.evicted.turns for turn in chat.turns)
    assert stats.evicted_tokens == sum(turn.evicted.tokens for turn in chat.turns)


def test_the_ledger_is_the_rendered_conversation():
    """Nothing is re-tokenised, and yet the ids are those of the template over everything that was said."""
    chat = opened(budget=4000)
    for text in MESSAGES[:4]:
        said(chat, text)
    whole = chat.engine.render(chat.messages, open_answer=False)
    assert chat._talk.ledger.ids.tolist() == chat.engine.encode(whole, special=True)


class FirstTurn(FakeEngine):
    """A template whose first message opens in its own way."""

    def render(self, messages: Any, *, open_answer: bool) -> str:
        text = super().render(messages, open_answer=open_answer)
        return text.replace("<|im_start|>user", "<|endoftext|>BEGIN", 1)


def test_a_first_turn_of_its_own_opens_only_the_first_message():
    chat = opened(FirstTurn(), budget=4000)
    for text in MESSAGES[:3]:
        said(chat, text)
    whole = chat.engine.render(chat.messages, open_answer=False)
    assert chat._talk.ledger.ids.tolist() == chat.engine.encode(whole, special=True)
    assert whole.count("BEGIN") == 1


def test_a_second_turn_is_what_one_long_run_would_be():
    chat = opened(budget=4000)
    said(chat, "hi")
    second = said(chat, "how are you?")
    one = FakeEngine().open(None)
    text = chat.engine.render(chat.messages[:-1], open_answer=True)
    logits, out = one.feed(chat.engine.encode(text, special=True)), []
    while (token := int(logits.argmax())) not in chat.engine.stop_tokens:
        out.append(token)
        logits = one.feed([token])
    assert second == chat.engine.decode(out)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=12), st.integers(60, 200), st.integers(0, 30), st.booleans())
def test_any_lengths_of_messages(lengths: list[int], budget: int, sinks: int, pinning: bool):
    policy = StreamingLLM(budget=budget, sinks=sinks) if pinning else SlidingWindow(budget=budget)
    chat = Chat.open(FakeEngine(answer_tokens=40), policy=policy, system="Hi.", sampling=GREEDY)
    for length in lengths:
        for _ in chat.send("x" * length):
            check_step(chat)
        check_step(chat)
        check_turns(chat)
        exchange = chat.turns[-1].stop - chat.turns[-2].start
        if exchange <= budget - max(sinks, chat._talk.pins, len(chat._talk.template.head)):
            check_whole_turns(chat)


# Boundaries.


def test_room_is_made_exactly_when_it_is_needed():
    """A message that fits to the token evicts nothing; one token more evicts one exchange, and no more."""
    for extra, turns in ((0, 0), (1, 2)):
        chat = opened(max_tokens=1, budget=300)
        said(chat, "first")
        said(chat, "second")
        free = 300 - chat.stats().held
        pieces = chat._talk.template
        length = free - len(pieces.user_open) - len(pieces.user_close) + extra
        answer = chat.send("x" * length)
        next(answer)
        assert chat.turns[-1].evicted.turns == turns
        assert chat.stats().held == (300 if not turns else 301 - (chat.turns[1].stop - chat.turns[0].start))


def test_a_message_larger_than_the_window_falls_back_to_tokens():
    chat = opened()
    said(chat, "hi")
    head = len(chat._talk.template.head)
    said(chat, "y" * 1000)
    check_step(chat)
    check_turns(chat)
    assert stream_of(chat).tokens[:head] == list(chat._talk.template.head)
    assert chat.turns[2].evicted.tokens > 800
    assert "part of a turn" in (chat.stats().notice or "") or "turns" in (chat.stats().notice or "")
    said(chat, "hi")
    check_whole_turns(chat)


def test_a_prompt_of_several_budgets_in_one_message_is_fed_in_order():
    """The held tokens after a long message are those of the window rule, and the next answer depends on them."""
    chat = opened()
    for _ in chat.send("z" * 900):
        check_step(chat)
    held = chat.engine.decode(stream_of(chat).tokens)
    assert held.startswith(f"system\n{SYSTEM}\n" + "z" * 50)


def test_an_endless_answer_keeps_the_budget_at_every_step():
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=2000)
    said(chat, "hi")
    steps = 0
    for _ in chat.send("go on"):
        check_step(chat)
        steps += 1
    assert steps > 1500
    assert chat.stats().seen > 10 * chat.stats().budget
    assert not chat.turns[-1].finished
    check_turns(chat)
    said(chat, "still there?")
    check_step(chat)


def test_whole_turns_leave_while_an_answer_is_generated():
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=60)
    said(chat, "one")
    for _ in chat.send("two"):
        check_step(chat)
        check_whole_turns(chat)
    assert chat.turns[-1].evicted.turns == 2
    assert chat.turns[-2].evicted.turns == 0


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens_counts_generated_tokens(limit: int):
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=limit)
    assert len(said(chat)) == limit
    assert not chat.turns[-1].finished
    check_turns(chat)


# System prompts.


def test_a_prompt_that_leaves_room_for_the_shortest_exchange_is_taken_and_one_more_is_not():
    engine = FakeEngine()
    probe = opened(engine)._talk.template
    needed = probe.turn_tokens + 2
    Chat.open(engine, system=SYSTEM, budget=len(probe.head) + needed)
    with pytest.raises(BudgetError) as error:
        Chat.open(engine, system=SYSTEM, budget=len(probe.head) + needed - 1)
    assert f"takes {len(probe.head)} tokens and the budget is {len(probe.head) + needed - 1}" in str(error.value)
    assert f"raise the budget to at least {len(probe.head) + needed}" in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [99, 100, 101, 1000])
def test_a_prompt_as_large_as_the_budget_is_refused_with_both_sizes(policy: str, size: int):
    with pytest.raises(BudgetError, match=rf"takes {size + 10} tokens and the budget is 100.*raise the budget"):
        Chat.open(FakeEngine(), system="s" * size, budget=100, policy=policy)


def test_sinks_that_leave_no_room_are_refused():
    with pytest.raises(BudgetError, match="sinks take 90 tokens and the budget is 100"):
        Chat.open(FakeEngine(), budget=100, sinks=90)


def test_a_default_prompt_of_the_template_that_does_not_fit_is_named():
    with pytest.raises(BudgetError, match="what the chat template begins with takes"):
        Chat.open(FakeEngine(default_system="d" * 200), budget=100)


def test_pins_are_the_longer_of_sinks_and_prompt():
    assert opened().stats().pinned == len(opened()._talk.template.head)
    chat = opened(system=None, sinks=9)
    said(chat)
    assert chat.stats().pinned == 9
    assert opened(policy="sliding-window").stats().pinned == 0


def test_sliding_window_lets_the_prompt_go_and_says_so():
    chat = opened(policy="sliding-window")
    for _ in range(6):
        said(chat, "tell me more about it")
    assert chat.engine.decode(stream_of(chat).tokens).count(SYSTEM) == 0
    assert "the system prompt among them" in (chat.stats().notice or "")


# A cache that never evicts.


def test_full_says_when_it_is_full_and_keeps_what_was_said():
    chat = opened(policy="full", budget=200)
    while chat.stats().seen < 120:
        said(chat)
    before = (chat.stats().seen, chat.messages)
    with pytest.raises(ContextFull, match=r"message takes \d+ tokens and \d+ of 200 .*reset\(\).*streaming-llm"):
        said(chat, "x" * 100)
    assert (chat.stats().seen, chat.messages) == before
    chat.reset()
    assert said(chat)


@pytest.mark.parametrize(("extra", "refused"), [(0, False), (1, True)])
def test_full_takes_a_message_that_leaves_room_for_one_token_of_answer(extra: int, refused: bool):
    chat = opened(policy="full", budget=200)
    pieces = chat._talk.template
    around = len(pieces.head) + pieces.turn_tokens
    answer = chat.send("x" * (200 - around - 1 + extra))
    with pytest.raises(ContextFull, match="message takes" if refused else "answer was cut"):
        assert len(list(answer)) == 1
    assert len(chat.turns) == (0 if refused else 2)
    check_turns(chat)


def test_full_cuts_an_answer_at_its_limit_and_closes_it():
    chat = opened(FakeEngine(answer_tokens=None), policy="full", budget=100)
    pieces = []
    with pytest.raises(ContextFull, match="answer was cut"):
        pieces.extend(iter(chat.send("hi")))
    assert chat.messages[-1]["content"].startswith("".join(pieces)) and not chat.turns[-1].finished
    assert chat.stats().seen == 100
    check_turns(chat)


# Nobody told.


def test_an_eviction_is_told():
    chat = opened()
    said(chat, "hi")
    assert chat.stats().notice is None
    told = set()
    for _ in range(8):
        said(chat, "tell me more about it")
        user, assistant = chat.turns[-2:]
        gone = user.evicted.tokens + assistant.evicted.tokens
        turns = user.evicted.turns + assistant.evicted.turns
        if gone:
            assert chat.stats().notice == f"{turns} turns ({gone} tokens) left the cache"
            told.add(chat.stats().notice)
    assert len(told) > 1


# Stopping.


def test_a_stop_string_ends_the_answer_before_it():
    plain = said(opened(FakeEngine(answer_tokens=None), max_tokens=60))
    stop = plain[20:24]
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=60, stop=[stop, "never"])
    pieces = list(chat.send("hi"))
    assert "".join(pieces) == plain[: plain.index(stop)]
    assert chat.turns[-1].finished
    check_step(chat)
    check_turns(chat)


def test_the_model_never_sees_a_stop_string_it_wrote():
    plain = said(opened(FakeEngine(answer_tokens=None), max_tokens=60))
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=60, stop=plain[20:24])
    said(chat)
    assert chat.engine.decode(stream_of(chat).tokens).endswith(plain[: plain.index(plain[20:24])] + "\n")


def test_a_stop_string_after_an_eviction_is_not_rolled_back():
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=400)
    plain = said(chat)
    again = opened(FakeEngine(answer_tokens=None), max_tokens=400, stop=plain[300:304])
    assert said(again) == plain[: plain.index(plain[300:304])]
    check_step(again)
    check_turns(again)


@pytest.mark.parametrize("how", ["close", "next send", "exception", "interrupt"])
def test_an_answer_cut_short_stays_and_the_next_message_follows(how: str):
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=50)
    answer = chat.send("hi")
    part = [next(answer) for _ in range(5)]
    if how == "close":
        answer.close()  # pyright: ignore[reportAttributeAccessIssue]
    elif how == "next send":
        next(chat.send("other"))
        assert list(answer) == []
    else:
        error = KeyboardInterrupt if how == "interrupt" else RuntimeError
        with pytest.raises(error):
            answer.throw(error())  # pyright: ignore[reportAttributeAccessIssue]
    assert chat.messages[2] == {"role": "assistant", "content": "".join(part)}
    assert not chat.turns[1].finished
    check_step(chat)
    assert len(said(chat, "again")) == 50
    check_step(chat)
    check_turns(chat)


def test_a_loop_that_is_left_closes_the_answer():
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=50)
    for _ in chat.send("hi"):
        break
    assert len(chat.turns) == 2
    check_turns(chat)


class Interrupting(FakeStream):
    """Ctrl-C while the model is at work."""

    at = 10

    def feed(self, tokens: Any) -> Any:
        self.at -= 1
        logits = super().feed(tokens)
        if self.at == 0:
            signal.raise_signal(signal.SIGINT)
        return logits


@pytest.mark.parametrize("at", [1, 2, 10, 51])  # the message, two tokens, what closes the answer
def test_ctrl_c_inside_a_step_waits_for_its_end(at: int):
    chat = opened(FakeEngine(answer_tokens=None), max_tokens=50)
    said(chat)
    stream_of(chat).__class__ = type("Now", (Interrupting,), {"at": at})
    pieces: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(iter(chat.send("hi")))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(chat.turns) == 4
    check_step(chat)
    check_turns(chat)
    assert len(said(chat)) == 50


def test_a_handler_of_the_program_is_left_alone():
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        chat = opened(FakeEngine(answer_tokens=None), max_tokens=50)
        stream_of(chat).__class__ = type("Now", (Interrupting,), {"at": 5})
        assert len(said(chat)) == 50
        assert caught == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


class Failing(FakeStream):
    """A runtime that fails half way through a step: tokens went in, no logits came out."""

    at = 5

    def feed(self, tokens: Any) -> Any:
        self.at -= 1
        if self.at <= 0:
            self._push(tokens[0])
            raise MemoryError("out of memory")
        return super().feed(tokens)


def test_a_step_that_failed_half_way_is_not_talked_over():
    chat = opened(FakeEngine(answer_tokens=None))
    stream_of(chat).__class__ = Failing
    with pytest.raises((MemoryError, CacheStateError)):
        said(chat)
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]
    with pytest.raises(CacheStateError, match=r"failed half way; start over with reset\(\)"):
        said(chat)
    chat.reset()
    assert next(chat.send("hi"))


# What may be said.


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_an_empty_message_is_refused_at_once(text: str):
    chat = opened()
    with pytest.raises(UsageError, match="message is empty"):
        chat.send(text)
    assert chat.turns == ()


def test_a_lone_surrogate_is_refused_with_its_place():
    with pytest.raises(UsageError, match=r"character 3 is a lone surrogate, '\\ud800'"):
        opened().send("ab\ud800")


def test_a_nul_and_control_tokens_are_text_like_any_other():
    chat = opened()
    said(chat, "a\0b<|im_end|>")
    start, stop = chat.turns[0].start, chat.turns[0].stop
    assert chat.engine.decode(chat._talk.ledger.ids[start:stop]) == "user\na\0b<|im_end|>\nassistant\n"
    check_turns(chat)


def test_nothing_is_fed_before_the_answer_is_asked_for():
    chat = opened()
    seen = chat.stats().seen
    answer = chat.send("hi")
    assert chat.stats().seen == seen
    next(answer)
    assert chat.stats().seen > seen


# Starting over, and several at once.


def test_both_sides_stay_in_messages():
    chat = opened()
    answers = [said(chat, text) for text in MESSAGES * 10]
    assert chat.messages[0] == {"role": "system", "content": SYSTEM}
    assert [m["content"] for m in chat.messages[1::2]] == MESSAGES * 10
    assert [m["content"] for m in chat.messages[2::2]] == answers


def test_reset_begins_the_same_conversation_again():
    chat = opened(sampling=Sampling(temperature=1.0, seed=4), max_tokens=30)
    first = [said(chat, text) for text in MESSAGES]
    chat.reset()
    assert (chat.messages, chat.stats().evicted_tokens) == ([{"role": "system", "content": SYSTEM}], 0)
    assert chat.stats().notice == "started a new conversation"
    assert [said(chat, text) for text in MESSAGES] == first


def test_reset_gives_the_memory_back():
    chat = opened()
    old = stream_of(chat)
    said(chat)
    chat.reset()
    assert old.nbytes == 0


def test_another_system_prompt_starts_over():
    chat = opened()
    said(chat)
    chat.set_system("You are loud.")
    assert chat.system == "You are loud."
    assert chat.messages == [{"role": "system", "content": "You are loud."}]
    assert chat.stats().notice == "started a new conversation with this system prompt"
    assert chat.engine.decode(stream_of(chat).tokens) == "system\nYou are loud.\n"
    chat.set_system(None)
    assert stream_of(chat).held == 0


def test_a_refused_system_prompt_changes_nothing():
    chat = opened()
    said(chat)
    before = chat.messages
    with pytest.raises(BudgetError):
        chat.set_system("x" * 500)
    assert (chat.system, chat.messages) == (SYSTEM, before)
    assert said(chat)
    check_step(chat)


def test_reset_during_an_answer_ends_it():
    chat = opened(FakeEngine(answer_tokens=None))
    answer = chat.send("hi")
    next(answer)
    chat.reset()
    assert list(answer) == []
    assert chat.turns == ()
    assert said(chat)


def test_conversations_do_not_disturb_each_other():
    engine = FakeEngine()
    alone = [said(chat, text) for chat in [opened(engine)] for text in MESSAGES * 4]
    one, other = opened(engine), opened(engine, policy="sliding-window", budget=90)
    together: list[str] = []
    for text in MESSAGES * 4:
        said(other, text[::-1])
        together.append(said(one, text))
    assert together == alone
    full = opened(engine, policy="full", budget=100)
    with pytest.raises(ContextFull):
        said(full, "x" * 200)
    assert said(opened(engine), MESSAGES[0]) == alone[0]


def test_the_same_seed_gives_the_same_answers():
    def answers(seed: int | None) -> list[str]:
        chat = opened(sampling=Sampling(temperature=2.0, seed=seed, repetition_penalty=1.2), max_tokens=40)
        return [said(chat, text) for text in MESSAGES]

    assert answers(1) == answers(1) != answers(2)
    assert answers(None) != answers(None)


def test_a_closed_chat_refuses_but_can_be_read():
    with opened() as chat:
        answer = said(chat)
        part = chat.send("more")
        piece = next(part)
    chat.close()
    assert chat.stats().cache_bytes == 0
    assert [m["content"] for m in chat.messages] == [SYSTEM, "hi", answer, "more", piece]
    assert list(part) == []
    for call in (lambda: chat.send("hi"), chat.reset, lambda: chat.set_system("x")):
        with pytest.raises(CacheStateError, match="closed"):
            call()


class Counted(FakeEngine):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_an_engine_that_was_given_stays_open():
    engine = Counted()
    opened(engine).close()
    assert engine.closed == 0


# Numbers.


def ticking() -> Iterator[float]:
    now = 0.0
    while True:
        now += 0.25
        yield now


def test_rates_come_from_the_clock():
    ticks = ticking()
    chat = Chat(
        FakeEngine(answer_tokens=None),
        policy=StreamingLLM(budget=200),
        sampling=GREEDY,
        max_tokens=9,
        clock=lambda: next(ticks),
    )
    assert (chat.stats().ttft_s, chat.stats().tokens_per_s) == (None, None)
    said(chat)
    assert chat.stats().ttft_s == pytest.approx(0.5)
    assert chat.stats().tokens_per_s == pytest.approx(4.0)


@settings(max_examples=60)
@given(st.integers(8, 200), st.integers(0, 12))
def test_the_picture_has_its_width_and_every_part(width: int, turns: int):
    chat = opened()
    for _ in range(turns):
        said(chat)
    line = chat.map(width)
    stats = chat.stats()
    assert len(line) == width and line[0] == "[" and line[-1] == "]"
    assert line[1:-1] == "".join(sorted(line[1:-1], key="#=-.".index))
    assert ("-" in line, "." in line) == (stats.held > stats.pinned, stats.budget > stats.held)
    if width > 100:
        assert abs(line.count("-") / (width - 2) - (stats.held - stats.pinned) / stats.budget) < 2 / width + 0.02


def test_a_picture_that_is_too_narrow_is_refused():
    with pytest.raises(UsageError, match="at least 8, got 7"):
        opened().map(7)


def test_full_and_sliding_windows_have_no_pins_in_the_picture():
    for policy in ("full", "sliding-window"):
        chat = opened(policy=policy)
        said(chat)
        assert not set("#=") & set(chat.map(40))


# Bad choices, refused at the door.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "nonsense"}, UnknownName, "known: full, sliding-window, streaming-llm"),
        ({"budget": 0}, BudgetError, "budget must be at least 1"),
        ({"sinks": -1}, BudgetError, "sinks must be at least 0"),
        ({"policy": "sliding-window", "sinks": 4}, UsageError, "no parameter 'sinks'"),
        ({"budget": 9000}, BudgetError, "8192"),
        ({"max_tokens": 0}, UsageError, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": True}, UsageError, "max_tokens"),
        ({"stop": [""]}, UsageError, "stop string"),
        ({"policy": StreamingLLM(budget=100)}, UsageError, "takes no parameters"),
        ({"template": "x"}, UsageError, "already has its template"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        opened(**options)


def test_an_engine_is_opened_by_name():
    chat = Chat.open("anything", engine="fake")
    assert chat.stats().budget == 1024
    assert chat._talk.pins == 4
    chat.close()
    with pytest.raises(UnknownName, match="unknown engine 'nope'; known: fake, transformers"):
        Chat.open("x", engine="nope")
    with pytest.raises(UsageError, match="no option 'template'"):
        Chat.open("x", engine="fake", template="{{ x }}")


class Attentive(SlidingWindow):
    """A policy that wants to see attention."""

    name = "attentive"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})


def test_a_policy_that_needs_attention_is_refused_before_the_first_token():
    engine = FakeEngine()
    with pytest.raises(UnsupportedCall, match=r"attentive needs attention.*would work: .*streaming-llm"):
        Chat.open(engine, policy=Attentive(budget=100))
    Chat.open(FakeEngine(supplies=frozenset({"attention"})), policy=Attentive(budget=100))


class Templateless(FakeEngine):
    def render(self, messages: Any, *, open_answer: bool) -> str:
        raise UnsupportedModel("no chat template; give one: headwater chat --template FILE")


def test_a_model_without_a_template_says_how_to_give_one():
    with pytest.raises(UnsupportedModel, match="--template FILE"):
        Chat.open(Templateless())
