"""The chat command as a process: in pipes, and on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRAM = """
import sys
from headwater.chat.sampling import Sampling
from headwater.chat.terminal import run
from headwater.engines import fake
engine = fake.FakeEngine.__init__
fake.FakeEngine.__init__ = lambda self, **options: (
    engine(self, **{**options, "answer_tokens": ANSWER}), print("loading noise"))[0]
sys.exit(run(model="tiny", engine="fake", system=None, template=None, policy="streaming-llm", budget=BUDGET, sinks=4,
    sampling=Sampling(temperature=0), max_tokens=LIMIT, stop=()))
"""


def program(answer: int | None = 24, budget: int = 300, limit: int = 400) -> list[str]:
    text = PROGRAM.replace("ANSWER", str(answer)).replace("BUDGET", str(budget)).replace("LIMIT", str(limit))
    return [sys.executable, "-c", text]


def piped(message: bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(program(**options), input=message, capture_output=True, timeout=60, check=False)


def test_a_pipe_gets_the_answer_alone():
    done = piped(b"hi\n")
    assert done.returncode == 0
    assert re.fullmatch(rb"[a-z ]+\n", done.stdout)
    assert done.stderr == b"loading noise\n"


def test_the_whole_of_a_pipe_is_one_message():
    """Paragraphs pasted into a pipe are one question: a message a line would be several."""
    one, two = piped(b"first\n\nsecond\n").stdout, piped(b"first\n").stdout
    assert one.count(b"\n") == 1
    assert one != two
    assert piped(b"first\n").stdout == piped(b"first").stdout


def test_what_was_dropped_and_cut_is_told_beside_the_answer():
    done = piped(b"x" * 500, answer=None, limit=10)
    assert re.fullmatch(rb".{10}\n", done.stdout)
    assert b"headwater: part of a turn (" in done.stderr and b"left the cache" in done.stderr
    assert b"headwater: the answer was cut at 10 tokens (--max-tokens)" in done.stderr


def test_an_empty_or_broken_pipe_is_an_error_before_the_model_loads():
    for message, words in ((b"", b"standard input is empty"), (b" \n", b"is empty"), (b"a\xff", b"at byte 1")):
        done = piped(message)
        assert done.returncode != 0
        assert words in done.stderr
        assert b"loading noise" not in done.stdout + done.stderr


class Terminal:
    """The other end of a pseudo-terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master, self.process, self.screen = master, process, ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, words: str, since: int = 0, seconds: float = 30) -> int:
        """Read until the words are on the screen; returns where they end."""
        end = time.monotonic() + seconds
        while words not in self.screen[since:]:
            assert time.monotonic() < end, f"{words!r} never came; the screen shows:\n{self.screen}"
            self._read()
        return self.screen.index(words, since) + len(words)

    def wait_for_words(self, since: int, seconds: float = 30) -> int:
        """Read until an answer is under way: three words in a row; returns where they end."""
        end = time.monotonic() + seconds
        while not (found := re.compile(r"[a-z]+ [a-z]+ [a-z]+ ").search(self.screen, since)):
            assert time.monotonic() < end, f"no answer came; the screen shows:\n{self.screen}"
            self._read()
        return found.end()

    def interrupt(self, words: str, since: int) -> int:
        """Ctrl-C until the words are on the screen; returns where they end.

        A signal between the moment a prompt is drawn and the one readline waits for a key is not seen before the next
        key, as in every Python program with a prompt; a person is never that fast.
        """
        end = time.monotonic() + 30
        while words not in self.screen[since:] and time.monotonic() < end:
            time.sleep(0.2)
            self.process.send_signal(signal.SIGINT)
            self._read()
        return self.wait_for(words, since, seconds=1)

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            self.screen += re.sub(r"\x1b[\[\]][0-9;?]*[a-zA-Z]", "", os.read(self.master, 65536).decode())


@contextmanager
def terminal(**options: Any) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        program(**options), stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        os.close(master)


def test_a_session_on_a_terminal():
    with terminal() as screen:
        screen.wait_for("> ")
        screen.type("hello\r")
        place = screen.wait_for("tokens/s", screen.wait_for("hello"))
        assert "held" in screen.screen[:place] and "of 300" in screen.screen[:place]
        screen.type("/map\r")
        screen.wait_for("> ", screen.wait_for("- window", place))
        screen.type("\x04")
        assert screen.process.wait(10) == 0


def test_ctrl_c_stops_an_answer_and_the_next_one_works():
    with terminal(answer=None, limit=2_000_000) as screen:
        screen.wait_for("> ")
        screen.type("hello\r")
        screen.wait_for_words(screen.wait_for("hello\r\n"))
        screen.process.send_signal(signal.SIGINT)
        place = screen.wait_for("evicted", screen.wait_for("stopped; what was said so far stays"))
        screen.wait_for("> ", place)
        place = screen.wait_for("> ", screen.interrupt("Ctrl-D or /quit leaves", place))
        time.sleep(0.3)  # a key between two prompts would be lost with the interrupted line
        screen.type("again\r")
        place = screen.wait_for_words(screen.wait_for("again\r\n", place))
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("> ", screen.wait_for("stopped", place))
        screen.type("/quit\r")
        assert screen.process.wait(10) == 0


def test_the_up_arrow_brings_the_last_message_back():
    with terminal() as screen:
        screen.wait_for("> ")
        screen.type("hello\r")
        place = screen.wait_for("tokens/s", screen.wait_for("hello"))
        screen.wait_for("> ", place)
        screen.type("\x1b[A")
        screen.wait_for("hello", place)
        screen.type("\x04\r\x04")
