"""The terminal chat without a terminal: lines in, text out."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from headwater.chat.sampling import Sampling
from headwater.chat.screen import COMMANDS, Screen, describe_sampling, size
from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine

GREEDY = Sampling(temperature=0)


def talk(
    *lines: str | type[BaseException], engine: FakeEngine | None = None, slowly: bool = False, **options: Any
) -> tuple[str, Chat]:
    """What the screen shows when these lines are typed; an exception class is a key such as Ctrl-C. Slowly: only when
    the chat has nothing left to do meanwhile."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(typed)
        for work in threading.enumerate():
            if slowly and work.name == "headwater-idle":
                work.join(60)
        console.print(prompt, end="")
        if not isinstance(line, str):
            raise line
        console.print(line, markup=False)
        return line

    console = Console(file=io.StringIO(), width=100, highlight=False)
    chat = Chat.open(engine or FakeEngine(), **{"budget": 200, "system": "Be brief.", "sampling": GREEDY, **options})
    assert Screen(chat, console=console, read=read).talk() == 0
    return console.file.getvalue(), chat  # pyright: ignore[reportAttributeAccessIssue]


def test_the_header_says_what_was_chosen():
    out, _ = talk()
    assert "· fake" in out
    assert "policy streaming-llm · budget 200 tokens · pinned 19 (prompt 19, sinks 4) · cache 152 B" in out
    assert "greedy, repetition penalty 1.1 · answers up to 512 tokens" in out


def test_an_answer_and_its_status():
    out, chat = talk("hi")
    stats = chat.stats()
    assert f"> hi\n{chat.messages[-1]['content']}\nseen {stats.seen} · held {stats.held} of 200 · pinned 19" in out
    assert "evicted 0 turns · cache" in out and "tokens/s" in out


def test_notes_are_written_while_the_user_types():
    story = "the boat left the harbour in the rain and nobody knew where it went, but for the parrot"
    options: dict[str, Any] = {"budget": 600, "summary_tokens": 200, "max_tokens": 30}
    out, chat = talk(*[story] * 16, "/notes", slowly=True, **options)
    assert len(chat.notes) >= 2
    assert "notes on turns 1 to " in out and chat.notes[-1].text.splitlines()[0] in out
    assert "recalled for this answer: notes on turns" in out
    talk(*[story] * 16, "/notes", **options)
    assert "headwater-idle" not in {each.name for each in threading.enumerate()}, "its work is over when the chat is"
    assert "no notes have been written" in talk("/notes")[0]


def test_an_eviction_is_shown_once():
    out, chat = talk(*["tell me more about it"] * 6, "/map")
    assert out.count("left the cache") == sum(
        user.evicted.tokens + answer.evicted.tokens > 0
        for user, answer in zip(chat.turns[::2], chat.turns[1::2], strict=True)
    )
    assert f"evicted {chat.stats().evicted_turns} turns" in out


def test_every_command_is_in_the_help_and_known():
    out, _ = talk("/help")
    for name, meaning in COMMANDS.items():
        assert f"{name:8} {meaning}"[:60] in out
        assert "unknown command" not in talk(name)[0]


def test_stats_and_map():
    out, chat = talk("hi", "/stats", "/map")
    assert f"held             {chat.stats().held} of 200 tokens" in out
    assert chat.map(100) in out
    assert "# sinks   = pinned prompt   - window   . room" in out


def test_system_is_shown_changed_and_refused():
    out, chat = talk("hi", "/system", "/system You are loud.", "/system " + "x" * 300)
    assert "> /system\nBe brief.\n" in out
    assert "started a new conversation with this system prompt (23 tokens pinned)" in out
    assert "system prompt takes 310 tokens and the budget is 200" in out.replace("\n", " ")
    assert (chat.system, chat.turns) == ("You are loud.", ())


def test_reset():
    out, chat = talk("hi", "/reset")
    assert "started a new conversation" in out
    assert chat.turns == ()


@pytest.mark.parametrize("line", ["/nope", "/HELP me", "/"])
def test_an_unknown_command_lists_the_known_ones(line: str):
    out, chat = talk(line)
    assert f"unknown command {line.split(' ')[0]}; known: {', '.join(COMMANDS)}" in out.replace("\n", " ")
    assert chat.turns == ()


def test_a_command_that_takes_nothing_says_so():
    assert "/reset takes nothing after it, got 'now'" in talk("hi", "/reset now")[0]


def test_a_space_makes_a_slash_a_message():
    _, chat = talk(" /nope")
    assert chat.turns[0].text == " /nope"


def test_quit_leaves_and_an_empty_line_says_nothing():
    _, chat = talk("", "   ", "/quit", "hi")
    assert chat.turns == ()


def test_ctrl_c_at_the_prompt_says_how_to_leave():
    out, chat = talk(KeyboardInterrupt, "hi")
    assert "Ctrl-D or /quit leaves" in out
    assert len(chat.turns) == 2


class Interrupted(FakeEngine):
    """Ctrl-C after a few tokens of the first answer."""

    left = 8

    def decode(self, tokens: Any) -> str:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().decode(tokens)


def test_ctrl_c_stops_an_answer_and_keeps_the_session():
    out, chat = talk("one", "two", engine=Interrupted(answer_tokens=None), max_tokens=30)
    assert "stopped; what was said so far stays" in out
    assert len(chat.turns) == 4
    assert 0 < len(chat.turns[1].text) < 30 == len(chat.turns[3].text)


def test_an_answer_cut_at_its_limit_says_so():
    out, _ = talk("hi", engine=FakeEngine(answer_tokens=None), max_tokens=5)
    assert "cut at 5 tokens (--max-tokens)" in out


def test_errors_are_shown_and_the_session_goes_on():
    out, chat = talk("a\udcff", "x" * 300, "hi", policy="full", budget=120)
    assert "character 2 is a lone surrogate" in out
    assert "never frees" in out
    assert len(chat.turns) == 2


class Hostile(FakeEngine):
    def decode(self, tokens: Any) -> str:
        return "\x1b]0;title\x07\x9b2J"[: len(list(tokens))]


def test_control_characters_of_an_answer_are_shown_not_obeyed():
    out, _ = talk("hi", engine=Hostile(answer_tokens=None), max_tokens=20)
    assert "␛]0;title␇" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_markup_in_an_answer_is_text():
    class Marked(FakeEngine):
        def decode(self, tokens: Any) -> str:
            return "[bold]x[/bold]"[: len(list(tokens))]

    assert "[bold]x[/bold]" in talk("hi", engine=Marked(answer_tokens=None), max_tokens=20)[0]


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (47_185_920, "47.2 MB"), (2.5e9, "2.5 GB")]
)
def test_sizes(count: int, words: str):
    assert size(count) == words


def test_sampling_in_words():
    chat = Chat.open(FakeEngine(), sampling=Sampling(min_p=0.05, seed=3))
    assert describe_sampling(chat) == (
        "temperature 0.7, top-k 50, top-p 0.95, min-p 0.05, repetition penalty 1.1, seed 3"
    )
