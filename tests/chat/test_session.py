"""Sessions on the fake engine: long past the window, and through everything that can go wrong in one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from headwater.errors import (
    BudgetError,
    ContextFull,
)
from headwater.policies.sliding_window import SlidingWindow
from headwater.policies.streaming_llm import StreamingLLM
from tests.chat.talk import (
    GREEDY,
    MESSAGES,
    SYSTEM,
    check_step,
    check_turns,
    check_whole_turns,
    opened,
    said,
    stream_of,
)

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


class Forgetful(FakeEngine):
    """A template that leaves out of history what was thought before an answer."""

    def render(self, messages: Any, *, open_answer: bool) -> str:
        told = [{**each, "content": re.sub("<think>.*?</think>", "", each["content"])} for each in messages]
        return super().render(told, open_answer=open_answer)


def test_what_a_template_would_strip_from_history_stays_as_it_was_fed():
    """Rendering the history again gives other ids, and everything after them would be computed again (Qwen3#1826)."""
    chat = opened(Forgetful(), budget=4000)
    chat.hear("hi", "<think>a greeting</think>hello")
    before, fed = list(stream_of(chat).tokens), chat.stats().fed
    assert "<think>a greeting</think>hello" in chat.engine.decode(before)
    said(chat, "how are you?")
    assert stream_of(chat).tokens[: len(before)] == before
    assert chat.stats().fed - fed == stream_of(chat).seen - len(before)
    check_step(chat)


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


@pytest.mark.parametrize("policy", ["full", "sliding-window", "streaming-llm"])
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
