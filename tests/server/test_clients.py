"""The `openai` client over a socket, on the fake engine: what a user's program does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from headwater.engines.fake import FakeEngine
from headwater.server.service import Service
from tests.server.served import over_a_socket, service, until, user


class Slow(FakeEngine):
    """A model that takes its time for a step."""

    pause_s = 0.004

    def decode(self, tokens: Any) -> str:
        time.sleep(self.pause_s)
        return super().decode(tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    served = service(tmp_path_factory.mktemp("clients"), FakeEngine(answer_tokens=24))
    with over_a_socket(served) as address:
        yield served, address


@pytest.fixture
def api(server: tuple[Service, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_chat_that_resends_everything(api: openai.OpenAI):
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    cached = []
    for number in range(25):
        messages.append(user(f"message {number}"))
        raw = api.chat.completions.with_raw_response.create(model="fake", messages=messages)
        answer = raw.parse()
        messages.append(answer.choices[0].message.model_dump())
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert raw.headers["x-headwater-how"] == ("continued" if number else "new")
    assert cached == sorted(cached)
    assert cached[-1] > 900


def test_a_stream(api: openai.OpenAI):
    stream = api.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(text)


def test_completions(api: openai.OpenAI):
    plain = api.completions.create(model="fake", prompt="Once upon a time", max_tokens=12)
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (16, len(plain.choices[0].text))
    stream = api.completions.create(model="fake", prompt="Once upon a time", max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    long = api.completions.create(model="fake", prompt="far longer than the budget " * 50, max_tokens=12)
    assert long.usage is not None and long.usage.prompt_tokens == 27 * 50
    with pytest.raises(openai.BadRequestError, match="empty"):
        api.completions.create(model="fake", prompt="")
    with pytest.raises(openai.BadRequestError, match="best_of"):
        api.completions.create(model="fake", prompt="a", best_of=3)


def test_responses_go_on_from_their_id(api: openai.OpenAI):
    first = api.responses.create(model="fake", input="hello", instructions="You are brief.")
    assert (first.status, first.output_text) != ("", "")
    second = api.responses.create(model="fake", input="and more", previous_response_id=first.id)
    third = api.responses.create(model="fake", input="and more still", previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens > first.usage.total_tokens  # type: ignore[union-attr]
    again = api.responses.create(model="fake", input="another way", previous_response_id=second.id)
    assert again.id != third.id
    assert api.responses.retrieve(first.id).output_text == first.output_text
    assert api.responses.retrieve(third.id).output_text == third.output_text, "what was taken back is still there"
    with pytest.raises(openai.NotFoundError, match="not found"):
        api.responses.create(model="fake", input="x", previous_response_id="resp_0_1_1")
    for wrong in ("x", first.id[:-1] + "9", "resp_../1/1", "resp__1_1"):
        with pytest.raises(openai.NotFoundError):
            api.responses.create(model="fake", input="x", previous_response_id=wrong)


def test_a_response_in_events(api: openai.OpenAI):
    whole = api.responses.create(model="fake", input="hello you")
    events = list(api.responses.create(model="fake", input="hello you", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]
    with api.responses.stream(model="fake", input="hello you") as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_a_response_that_is_not_to_be_kept(server: tuple[Service, str], api: openai.OpenAI):
    before = httpx2.get(f"{server[1]}/api/sessions").json()
    response = api.responses.create(model="fake", input="hello", store=False)
    assert response.output_text
    assert httpx2.get(f"{server[1]}/api/sessions").json() == before
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(response.id)


def test_embeddings(api: openai.OpenAI):
    name = "wordllama-l2-supercat-256"
    packed = api.embeddings.create(model=name, input=["a boat", "a ship"])
    plain = api.embeddings.create(model=name, input="a boat", encoding_format="float")
    vectors = [np.array(each.embedding) for each in packed.data]
    assert np.allclose(vectors[0], plain.data[0].embedding, atol=1e-6)
    assert np.isclose(np.linalg.norm(vectors[0]), 1)
    assert vectors[0] @ vectors[1] > 0.3
    with pytest.raises(openai.NotFoundError, match="makes no vectors"):
        api.embeddings.create(model="fake", input="a")
    with pytest.raises(openai.BadRequestError, match="256"):
        api.embeddings.create(model=name, input="a", dimensions=64)


def test_errors_are_the_clients_own(api: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        api.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], n=2)
    assert (wrong.value.param, wrong.value.code) == ("n", "unsupported_parameter")
    assert api.models.list().data[0].id == "fake"


# Going away.


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    served = service(tmp_path, Slow(answer_tokens=None), max_tokens=4000)
    with over_a_socket(served) as address:
        yield served, address


def answered(served: Service) -> int:
    return sum(1 for live in served.shelf.all() if not live.busy)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_answer(endless: tuple[Service, str], stream: bool):
    served, address = endless
    body = {"model": "fake", "messages": [user("hello")], "stream": stream}
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
        content = httpx2.Request("POST", address, json=body).content
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        until(lambda: any(live.busy and live.chat.stats().turns == 1 for live in served.shelf.all()))
        if stream:
            assert b"200 OK" in raw.recv(4096)
    until(lambda: answered(served) == 1)
    (live,) = served.shelf.all()
    said = live.chat.latest
    assert said is not None
    assert (said.role, said.finished) == ("assistant", False)
    assert len(said.text) < 2000
    until(lambda: not served._uses["local"].tokens)
    again = httpx2.post(f"{address}/v1/chat/completions", json={**body, "stream": False, "max_tokens": 5})
    assert again.status_code == 200


def test_an_answer_that_was_stopped_can_be_gone_on_from(endless: tuple[Service, str]):
    served, address = endless
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as api:
        seen = ""
        with api.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], stream=True) as s:
            for chunk in s:
                seen += chunk.choices[0].delta.content or ""
                if len(seen) > 20:
                    break
        until(lambda: answered(served) == 1)
        messages: list[Any] = [user("hi"), {"role": "assistant", "content": seen}, user("go on")]
        raw = api.chat.completions.with_raw_response.create(model="fake", messages=messages, max_tokens=4)
        assert raw.headers["x-headwater-how"] in ("continued", "edited"), "edited: what it had not seen was taken back"
        (live,) = served.shelf.all()
        assert [turn.text for turn in live.chat.turns[:3]] == ["hi", seen, "go on"]
        messages += [{"role": "assistant", "content": raw.parse().choices[0].message.content}, user("and on")]
        raw = api.chat.completions.with_raw_response.create(model="fake", messages=messages, max_tokens=4)
        assert raw.headers["x-headwater-how"] == "continued"


def test_a_slow_reader_holds_nobody_up(endless: tuple[Service, str]):
    served, address = endless
    content = httpx2.Request(
        "POST", address, json={"model": "fake", "messages": [user("hi")], "stream": True, "max_tokens": 4000}
    ).content
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        until(lambda: served.shelf.busy == 1)
        other = httpx2.post(
            f"{address}/v1/chat/completions", json={"model": "fake", "messages": [user("hello")], "max_tokens": 20}
        )
        assert other.status_code == 200
    until(lambda: served.shelf.busy == 0)


def test_many_take_turns(endless: tuple[Service, str]):
    """A long prompt and a long answer hold nobody up, and every answer is what it would be alone."""
    _, address = endless
    prompts = [f"client {number} " * (40 if number == 3 else 1) for number in range(6)]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as api:
        alone = {}
        ends: list[tuple[float, int]] = []

        def talk(number: int, into: dict[int, str]) -> None:
            messages: list[Any] = [user(prompts[number])]
            answer = api.chat.completions.create(model="fake", messages=messages, max_tokens=60)
            into[number] = answer.choices[0].message.content or ""
            ends.append((time.monotonic(), number))

        for number in range(6):
            talk(number, alone)
        ends.clear()
        together: dict[int, str] = {}
        began = time.monotonic()
        threads = [threading.Thread(target=talk, args=(number, together)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert together == alone
    took = [end - began for end, _ in ends]
    assert min(took) > 0.6 * max(took), "none is served before the others"


# The end.


def test_a_server_that_ends_lets_answers_end(tmp_path: Path):
    served = service(tmp_path, Slow(answer_tokens=None), max_tokens=50)
    said: dict[str, Any] = {}
    with over_a_socket(served) as address:

        def talk() -> None:
            said["response"] = httpx2.post(
                f"{address}/v1/chat/completions", json={"model": "fake", "messages": [user("hello")]}, timeout=30
            )

        thread = threading.Thread(target=talk)
        thread.start()
        until(lambda: served.shelf.busy == 1)
    thread.join(20)
    assert said["response"].status_code == 200
    assert said["response"].json()["usage"]["completion_tokens"] == 50
    assert list(tmp_path.glob("*/*.safetensors")), "saved"
