"""The chat on a terminal: a header, a prompt, answers as they come, a status line, commands.

Knows how things look and what the commands are called. Does not know how a conversation works (`session`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version

from rich.console import Console
from rich.text import Text

from headwater.chat.notes import about
from headwater.chat.recalling import origin
from headwater.chat.session import Chat
from headwater.chat.stats import LEGEND, Stats
from headwater.chat.wrap import Wrapper
from headwater.errors import HeadwaterError, UsageError

PROMPT = "> "
COMMANDS = {
    "/help": "list the commands",
    "/stats": "what the cache holds, and how fast the last answer was",
    "/map": "a picture of the cache",
    "/recall": "what memory would bring for a text: /recall TEXT",
    "/notes": "the model's notes on what left (--memory summary)",
    "/system": "show the system prompt; /system TEXT starts a new conversation with another one",
    "/reset": "start a new conversation with the same system prompt",
    "/quit": "leave",
}
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(128, 160), 0xFFFD)


class Screen:
    """One session at a terminal. `read` asks for a line, as `input` does."""

    def __init__(
        self,
        chat: Chat,
        *,
        console: Console | None = None,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self.chat = chat
        self.console = console if console is not None else Console(highlight=False)
        self.read = read if read is not None else _line_editor()

    def talk(self) -> int:
        """Read and answer until the user leaves; returns the exit code."""
        self._header()
        while True:
            try:
                if not self._turn():
                    return 0
            except KeyboardInterrupt:
                with suppress(KeyboardInterrupt):  # a second one, while this is being said
                    self.console.print()
                    self._say("Ctrl-D or /quit leaves")

    def _turn(self) -> bool:
        """Read one line and do what it says; False when the user leaves."""
        try:
            with self._idling():
                line = self.read(PROMPT)
        except EOFError:
            self.console.print()
            return False
        if line.strip() == "/quit":
            return False
        if line.startswith("/"):
            self._command(*line.strip().partition(" ")[::2])
        elif line.strip():
            self._exchange(line)
        return True

    @contextmanager
    def _idling(self) -> Iterator[None]:
        """Let the chat do what it does while nobody waits, until the user has typed."""
        typed = threading.Event()
        work = threading.Thread(target=self.chat.idle, args=(typed.is_set,), name="headwater-idle")
        work.start()
        try:
            yield
        finally:
            typed.set()
            work.join()

    # Answers.

    def _exchange(self, line: str) -> None:
        before = self.chat.stats().evicted_tokens
        stopped = False
        lines = Wrapper(self.console.width)
        try:
            answer = self.chat.send(line)
            for piece in answer:
                self._write(lines.push(piece))
        except KeyboardInterrupt:
            stopped = True
        except HeadwaterError as error:
            self._write(lines.finish() + "\n")
            self._complain(str(error))
            return
        self._write(lines.finish() + "\n")
        self._status(before, stopped=stopped)
        self.console.print()

    def _status(self, evicted_before: int, *, stopped: bool) -> None:
        now = self.chat.stats()
        if stopped:
            self._say("stopped; what was said so far stays")
        elif self.chat.turns and not self.chat.turns[-1].finished:
            self._say(f"cut at {self.chat.max_tokens} tokens (--max-tokens)")
        if now.notice is not None and now.evicted_tokens > evicted_before:
            self._say(now.notice)
        if now.trouble is not None:
            self._complain(now.trouble)
        if now.recalled:
            self._say(f"recalled for this answer: {'; '.join(now.recalled)}")
        rate = "" if now.tokens_per_s is None else f" · {now.tokens_per_s:.1f} tokens/s"
        self._say(
            f"seen {now.seen} · held {now.held} of {now.budget} · pinned {now.pinned} · "
            f"evicted {now.evicted_turns} turns · cache {size(now.cache_bytes)}{rate}"
        )

    # Commands.

    def _command(self, name: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/stats": self._stats,
            "/map": self._map,
            "/recall": self._recall,
            "/notes": self._notes,
            "/system": self._system,
            "/reset": self._reset,
        }
        if name not in commands:
            self._complain(
                f"unknown command {name}; known: {', '.join(COMMANDS)} (to say something that begins with /, put a "
                "space before it)"
            )
            return
        if rest.strip() and name not in ("/system", "/recall"):
            self._complain(f"{name} takes nothing after it, got {rest.strip()!r}")
            return
        try:
            commands[name](rest.strip())
        except HeadwaterError as error:
            self._complain(str(error))

    def _help(self, _: str) -> None:
        for name, meaning in COMMANDS.items():
            self.console.print(f"  [bold]{name:8}[/bold] {meaning}")
        self._say("  Ctrl-C stops an answer · Ctrl-D leaves · a message may begin with / after a space")

    def _stats(self, _: str) -> None:
        for name, value in rows(self.chat.stats()):
            self.console.print(f"  {name:16}", Text(value))

    def _map(self, _: str) -> None:
        now = self.chat.stats()
        self.console.print(self.chat.map(max(8, min(self.console.width, 100))), markup=False, soft_wrap=True)
        self._say(f"{LEGEND} ({now.held} of {now.budget} tokens held)")

    def _system(self, text: str) -> None:
        if not text:
            own = "none given; the model's template decides"
            self.console.print(self.chat.system or own, markup=False)
            return
        self.chat.set_system(text)
        self._say(f"{self.chat.stats().notice} ({self.chat.stats().pinned} tokens pinned)")

    def _recall(self, text: str) -> None:
        if not text:
            raise UsageError("/recall takes a text to look for: /recall the name of the boat")
        found = self.chat.recall(text)
        for each in found:
            self._say(f"  {origin(each.passage)}")
            self.console.print(Text(each.passage.text.translate(_CONTROLS)))
        if not found:
            self._say("nothing was found")

    def _notes(self, _: str) -> None:
        for note in self.chat.notes:
            self._say(f"  {about(note)}")
            self.console.print(Text(note.text.translate(_CONTROLS)))
        if not self.chat.notes:
            self._say("no notes have been written")

    def _reset(self, _: str) -> None:
        self.chat.reset()
        self._say(self.chat.stats().notice or "")

    # Output.

    def _header(self) -> None:
        chat, now = self.chat, self.chat.stats()
        name = Text(f"headwater {version('headwater')}", style="bold")
        session = "" if chat.session is None else f" · session {chat.session}, {now.turns} turns so far"
        self.console.print(name, Text(f"· {chat.engine.name}{session}"))
        self._say(
            f"policy {chat.policy.name} · budget {now.budget} tokens · {chat.pinning} · cache {size(now.cache_bytes)}\n"
            f"{describe_sampling(chat)} · answers up to {chat.max_tokens} tokens\n"
            "/help lists the commands · Ctrl-C stops an answer · Ctrl-D leaves"
        )
        for said in (now.notice, now.trouble):
            if said is not None:
                self._complain(said)

    def _write(self, piece: str) -> None:
        """A piece of an answer; control characters are shown, not obeyed."""
        self.console.print(Text(piece.translate(_CONTROLS)), end="", soft_wrap=True)

    def _say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))

    def _complain(self, text: str) -> None:
        self.console.print(Text(text.translate(_CONTROLS), style="bold"))


def size(count: int) -> str:
    """Bytes in words."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def rows(stats: Stats) -> list[tuple[str, str]]:
    """The numbers of a chat with their names."""
    return [
        ("seen", f"{stats.seen} tokens"),
        ("held", f"{stats.held} of {stats.budget} tokens"),
        ("pinned", f"{stats.pinned} tokens"),
        ("turns", str(stats.turns)),
        ("evicted", f"{stats.evicted_turns} turns, {stats.evicted_tokens} tokens"),
        ("cache", size(stats.cache_bytes)),
        ("speed", "nothing answered yet" if stats.tokens_per_s is None else f"{stats.tokens_per_s:.1f} tokens/s"),
        ("first token", "nothing answered yet" if stats.ttft_s is None else f"after {stats.ttft_s:.2f} s"),
        ("last notice", stats.notice or "nothing has left the cache"),
    ]


def describe_sampling(chat: Chat) -> str:
    """The sampling choices in words."""
    s = chat.sampling
    if s.temperature == 0:
        return "greedy" + (f", repetition penalty {s.repetition_penalty:g}" if s.repetition_penalty != 1 else "")
    knobs = [f"temperature {s.temperature:g}"]
    knobs += [f"top-k {s.top_k}"] * (s.top_k > 0) + [f"top-p {s.top_p:g}"] * (s.top_p < 1)
    knobs += [f"min-p {s.min_p:g}"] * (s.min_p > 0)
    knobs += [f"repetition penalty {s.repetition_penalty:g}"] * (s.repetition_penalty != 1)
    return ", ".join(knobs) + (f", seed {s.seed}" if s.seed is not None else ", no seed")


def _line_editor() -> Callable[[str], str]:
    """`input` with history and editing where the platform has them."""
    with suppress(ImportError):
        import_module("readline")  # importing it is what switches it on
    return input
