"""What goes wrong: kills, full disks, memory that is short, models that fail, many sockets."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from headwater.chat.store import Store
from headwater.engines.fake import FakeEngine, FakeStream
from tests.server.served import SYSTEM, asked, assistant, client, over_a_socket, service, talked, text_of, until, user

ROOT = Path(__file__).parents[2]
SOCKETS = 10_000


class Process:
    """A server in a process of its own, on the fake engine with endless answers of `tokens` tokens."""

    def __init__(self, folder: Path, *, tokens: int = 200, drain_s: float = 20) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.killed", str(folder), "0", str(tokens), str(drain_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("sessions"):
                break
        self.address = next(line.split()[1] for line in self.said if line.startswith("page")).rstrip("/")

        def up() -> bool:
            try:
                return httpx2.get(f"{self.address}/readyz").status_code == 200
            except httpx2.TransportError:
                return False

        until(up)

    def ask(self, messages: list[dict[str, Any]], **more: Any) -> httpx2.Response:
        body = {"model": "fake", "messages": messages, **more}
        return httpx2.post(f"{self.address}/v1/chat/completions", json=body, timeout=30)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process.communicate()
        return code


def test_it_says_where_it_is_and_what_a_session_costs(tmp_path: Path):
    server = Process(tmp_path)
    assert server.end(signal.SIGTERM) == 0
    said = "".join(server.said)
    assert "budget 300 tokens" in said
    assert "a session 2.4 kB of cache" in said
    assert "computed one after another (this engine computes one stream at a time), up to 8 at a time" in said
    assert "http://127.0.0.1:" in said
    assert "none; only this machine" in said


def test_every_message_that_was_answered_outlives_a_kill(tmp_path: Path):
    told: list[tuple[str, str, str]] = []
    for turn in range(3):
        server = Process(tmp_path, tokens=60)

        def talk(number: int, server: Process = server, turn: int = turn) -> None:
            messages: list[Any] = [SYSTEM]
            for count in range(1000):
                messages.append(user(f"client {number} turn {turn} message {count}"))
                try:
                    response = server.ask(messages)
                except httpx2.TransportError:
                    return
                messages.append(assistant(text_of(response)))
                told.append((response.headers["x-headwater-session"], messages[-2]["content"], messages[-1]["content"]))

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        wanted = len(told) + 6
        until(lambda wanted=wanted: len(told) > wanted, timeout_s=30)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        for thread in threads:
            thread.join(30)
    kept = {said.name: said.texts for said in Store(tmp_path / "local.db").said()}
    for name, question, answer in told:
        place = kept[name].index(question)
        assert kept[name][place + 1] == answer
    server = Process(tmp_path)
    name, question, answer = told[-1]
    place = kept[name].index(question)
    history = [SYSTEM] + [(user, assistant)[index % 2](text) for index, text in enumerate(kept[name][: place + 2])]
    assert server.ask([*history, user("still there?")]).headers["x-headwater-session"] == name
    assert server.end(signal.SIGTERM) == 0


def test_answers_that_take_too_long_at_the_end_are_ended(tmp_path: Path):
    server = Process(tmp_path, tokens=4000, drain_s=0.3)
    lines: list[str] = []

    def talk() -> None:
        body = {"model": "fake", "messages": [user("hi")], "stream": True}
        with httpx2.stream("POST", f"{server.address}/v1/chat/completions", json=body, timeout=30) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=talk)
    thread.start()
    until(lambda: list(tmp_path.glob("local.db")))
    time.sleep(0.2)
    assert server.end(signal.SIGTERM) == 0
    thread.join(20)
    assert "shutting down" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    (said,) = Store(tmp_path / "local.db").said()
    shown = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in lines
        if line.startswith("data: ") and '"choices"' in line
    )
    assert said.texts == ("hi", shown)
    assert list(tmp_path.glob("local-sessions/*.safetensors"))


# Memory and the disk.


def test_sessions_that_do_not_fit_leave_for_their_snapshots(tmp_path: Path):
    """Room for three: twelve talk in turn, and each goes on as if it had been alone."""
    plenty = service(tmp_path / "plenty")
    short = service(tmp_path / "short", memory_bytes=3 * plenty.shelf.session_bytes)
    told: list[list[str]] = []
    for served in (plenty, short):
        with client(served) as inside:
            talks: list[Any] = [[SYSTEM, user(f"I am client {number}")] for number in range(12)]
            for _ in range(4):
                for said in talks:
                    said += [assistant(text_of(asked(inside, said))), user("and so on, and on, and on")]
            if served is short:
                assert len(short.shelf) <= 3
                assert short.shelf.nbytes <= 3 * plenty.shelf.session_bytes
                assert short.shelf.saved >= 9
            told.append([message["content"] for said in talks for message in said])
    assert told[0] == told[1]


def test_however_small_they_are_only_so_many_are_in_memory(tmp_path: Path):
    served = service(tmp_path)
    served.shelf.most = 3
    with client(served) as inside:
        for number in range(8):
            assert asked(inside, [SYSTEM, user(f"I am client {number}")]).status_code == 200
            assert len(served.shelf) <= 3
        assert served.shelf.saved == 5


def test_a_full_disk_loses_nothing(small_disk: Path):
    with client(service(small_disk)) as inside:
        said, _ = talked(inside, 2)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        said.append(user("does this get lost?"))
        response = asked(inside, said)
        assert response.status_code == 200
        said.append(assistant(text_of(response)))
        assert "disk" in response.json()["headwater"]["trouble"]
        new = asked(inside, [SYSTEM, user("a new one")])
        assert (new.status_code, new.json()["error"]["code"]) == (503, "store_unavailable")
        filler.unlink()
        said.append(user("and now?"))
        response = asked(inside, said)
        assert response.json()["headwater"]["trouble"] is None
        assert response.headers["x-headwater-how"] == "continued"
        said.append(assistant(text_of(response)))
    (kept,) = Store(small_disk / "local.db").said()
    assert list(kept.texts) == [message["content"] for message in said[1:]]


# The model.


def test_a_step_that_fails_costs_its_answer_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with client(service(tmp_path)) as inside:
        said, responses = talked(inside, 6)
        steps = [0]
        feed = FakeStream.feed

        def failing(self: FakeStream, tokens: Any) -> Any:
            steps[0] += 1
            if steps[0] == 5:
                raise MemoryError("no memory for this step")
            return feed(self, tokens)

        monkeypatch.setattr(FakeStream, "feed", failing)
        said.append(user("will this fail?"))
        assert asked(inside, said).status_code == 500
        monkeypatch.setattr(FakeStream, "feed", feed)
        again = asked(inside, said)
        assert again.status_code == 200
        assert again.headers["x-headwater-session"] == responses[0].headers["x-headwater-session"]
        assert inside.get("/readyz").status_code == 200


def test_an_answer_that_takes_too_long(tmp_path: Path):
    with client(service(tmp_path, FakeEngine(answer_tokens=None), max_tokens=4096, timeout_s=0.1)) as inside:
        response = asked(inside, [user("hi")])
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        (name,) = [each["name"] for each in inside.get("/api/sessions").json()["sessions"]]
        messages = inside.get(f"/api/sessions/{name}").json()["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert not messages[1]["finished"]


def test_a_policy_that_never_evicts_says_when_it_is_full(tmp_path: Path):
    with client(service(tmp_path, policy="full", budget=120)) as inside:
        said: list[Any] = [user("a first message that is rather long")]
        while (response := asked(inside, said)).status_code == 200:
            said += [assistant(text_of(response)), user("and more, and more")]
        assert (response.status_code, len(said) > 1) == (400, True)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        before = inside.get("/api/sessions").json()["sessions"][0]["turns"]
        assert asked(inside, said).status_code == 400
        assert inside.get("/api/sessions").json()["sessions"][0]["turns"] == before


def test_a_system_prompt_that_does_not_fit(tmp_path: Path):
    with client(service(tmp_path, budget=60)) as inside:
        response = asked(inside, [{"role": "system", "content": "x" * 100}, user("hi")])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "raise the budget" in response.json()["error"]["message"]
        assert inside.get("/api/sessions").json()["sessions"] == []


# Sockets.


def test_ten_thousand_sockets_that_say_nothing(tmp_path: Path):
    """Half of them began a request and never go on; who has something to say is answered, and all are let go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < SOCKETS + 500:
        pytest.skip(f"a process may have {hard} files open here")
    server = Process(tmp_path)
    port = int(server.address.rpartition(":")[2])
    silent: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOCKETS + 500, hard))
    try:
        for number in range(SOCKETS):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            if number % 2:
                silent[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        until(lambda: psutil.Process(server.process.pid).num_fds() >= SOCKETS, timeout_s=60)
        assert httpx2.get(f"{server.address}/healthz", timeout=20).status_code == 200
        assert text_of(server.ask([user("hi")], max_tokens=8))
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.end(signal.SIGTERM) == 0


def test_half_a_request_ends_in_time(tmp_path: Path):
    served = service(tmp_path, body_s=0.2)
    with (
        over_a_socket(served) as address,
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw,
    ):
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        raw.settimeout(5)
        assert b"408" in raw.recv(4096)


def test_small_pieces_are_sent_at_once(tmp_path: Path):
    """A socket that does not say it is TCP is not set so, and every answer then waits for the client's receipt."""
    with over_a_socket(service(tmp_path)) as address, httpx2.Client(base_url=address) as api:
        took = []
        for _ in range(15):
            began = time.perf_counter()
            assert api.get("/healthz").status_code == 200
            took.append(time.perf_counter() - began)
    assert min(took) < 0.03, took


def test_garbage_on_the_wire(tmp_path: Path):
    with over_a_socket(service(tmp_path)) as address:
        port = int(address.rpartition(":")[2])
        for garbage in (
            b"\x00\xff" * 50 + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET http://[ HTTP/1.1\r\n\r\n",
            os.urandom(500),
        ):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                raw.settimeout(5)
                answer = raw.recv(4096)
                assert not answer or b" 400 " in answer or b" 403 " in answer, answer
        assert httpx2.get(f"{address}/healthz").status_code == 200


def test_two_requests_for_one_named_session_wait_for_each_other(tmp_path: Path):
    with over_a_socket(service(tmp_path, FakeEngine(answer_tokens=None), max_tokens=150)) as address:

        async def both() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(timeout=30) as api:
                headers = {"x-headwater-session": "shared"}
                asks = [
                    api.post(
                        f"{address}/v1/chat/completions",
                        json={"model": "fake", "messages": [user(f"message {number}")]},
                        headers=headers,
                    )
                    for number in range(4)
                ]
                return list(await asyncio.gather(*asks))

        responses = asyncio.run(both())
        assert [response.status_code for response in responses] == [200] * 4
        shown = httpx2.get(f"{address}/api/sessions/shared").json()
        assert len(shown["messages"]) == 8
        assert {m["content"] for m in shown["messages"][::2]} == {f"message {number}" for number in range(4)}
