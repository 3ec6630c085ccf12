"""Sessions on the fake engine: how answers stop, what may be said, starting over, numbers, bad choices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
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
from tests.chat.talk import GREEDY, MESSAGES, SYSTEM, check_step, check_turns, opened, said, stream_of

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
    assert chat.stats().ttft_s == pytest.approx(0.25)
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
        ({"policy": "nonsense"}, UnknownName, "known: full, h2o, pyramidkv, random, "),
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
    with pytest.raises(UnknownName, match="unknown engine 'nope'; known: fake, llamacpp, mlx, transformers"):
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


LIVE = ("full", "sliding-window", "streaming-llm")


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in LIVE])
@pytest.mark.parametrize("supplies", [frozenset(), frozenset({"attention"})], ids=["nothing", "attention"])
def test_a_policy_that_only_replays_is_refused_by_name_with_what_runs_live(name: str, supplies: frozenset[str]):
    with pytest.raises(UnsupportedCall, match=rf"^{name} .*sliding-window.*streaming-llm$") as refusal:
        Chat.open(FakeEngine(supplies=supplies), policy=name)
    others = set(POLICIES) - {name, *LIVE}
    assert not any(other in str(refusal.value) for other in others)


class Templateless(FakeEngine):
    def render(self, messages: Any, *, open_answer: bool) -> str:
        raise UnsupportedModel("no chat template; give one: headwater chat --template FILE")


def test_a_model_without_a_template_says_how_to_give_one():
    with pytest.raises(UnsupportedModel, match="--template FILE"):
        Chat.open(Templateless())
