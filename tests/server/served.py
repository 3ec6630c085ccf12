"""What the server's tests share: a service on the fake engine, a client inside this process, one over a socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from starlette.testclient import TestClient

from headwater.chat.sampling import Sampling
from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine
from headwater.policies import policy as make_policy
from headwater.server.app import create_app
from headwater.server.serve import listening
from headwater.server.service import Options, Service
from headwater.server.sessions import Manner

BASE = "http://127.0.0.1"
GREEDY = Sampling(temperature=0)
SYSTEM = {"role": "system", "content": "You are brief."}


def service(folder: Path, engine: Engine | None = None, *, budget: int = 300, **options: Any) -> Service:
    manner = Manner(
        policy=make_policy(options.pop("policy", "streaming-llm"), budget=budget),
        sampling=GREEDY,
        max_tokens=options.pop("max_tokens", 64),
        memory_tokens=options.pop("memory_tokens", 100),
    )
    return Service(engine or FakeEngine(), manner, Options(folder=folder, **options))


@contextmanager
def client(served: Service) -> Iterator[TestClient]:
    with TestClient(create_app(served), base_url=BASE, raise_server_exceptions=False) as inside:
        yield inside


@contextmanager
def over_a_socket(served: Service) -> Iterator[str]:
    """The address of a server that runs in a thread of this process."""
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn.Config(create_app(served), log_config=None, access_log=False, lifespan="on", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield f"{BASE}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def until(true: Any, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def asked(inside: TestClient | httpx2.Client, messages: list[dict[str, Any]], **more: Any) -> httpx2.Response:
    headers = more.pop("headers", {})
    return inside.post("/v1/chat/completions", json={"model": "fake", "messages": messages, **more}, headers=headers)


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the mark at its end."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def talked(inside: TestClient, turns: int, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    """A conversation of a client that resends everything: the messages, and the responses."""
    said = [SYSTEM] if messages is None else list(messages)
    responses = []
    for number in range(turns):
        said.append(user(f"message {number} of this talk"))
        responses.append(asked(inside, said, **more))
        said.append(assistant(text_of(responses[-1])))
    return said, responses
