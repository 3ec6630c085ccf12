"""The chat endpoint, in process on the fake engine: answers, streams, sessions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.chat.session import Chat
from headwater.engines.fake import FakeEngine
from tests.server.served import GREEDY, SYSTEM, asked, assistant, chunks_of, client, service, talked, text_of, user


def test_an_answer_is_what_the_chat_itself_would_say(tmp_path: Path):
    chat = Chat.open(FakeEngine(), system=SYSTEM["content"], budget=300, sampling=GREEDY, max_tokens=64)
    with client(service(tmp_path)) as inside:
        said, responses = talked(inside, 20)
    answers = ["".join(chat.send(message["content"])) for message in said if message["role"] == "user"]
    assert [message["content"] for message in said if message["role"] == "assistant"] == answers
    assert chat.stats().evicted_turns > 10
    body = responses[-1].json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["finish_reason"] == ("stop" if chat.turns[-1].finished else "length")
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["headwater"]["evicted_turns"] == chat.stats().evicted_turns
    assert body["headwater"]["notice"] == chat.stats().notice


def test_what_was_evicted_long_ago_is_not_fed_again(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        _, responses = talked(inside, 40)
    assert {response.headers["x-headwater-session"] for response in responses} == {
        responses[0].headers["x-headwater-session"]
    }
    assert [response.headers["x-headwater-how"] for response in responses] == ["new"] + ["continued"] * 39
    fed = [int(response.headers["x-headwater-fed"]) for response in responses]
    assert max(fed[1:]) <= 60, "a question and its template"
    usage = responses[-1].json()["usage"]
    assert usage["prompt_tokens"] > 1500
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - fed[-1]
    assert int(responses[-1].headers["x-headwater-held"]) <= 300


def test_a_stream_says_the_same_in_chunks(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        asked(inside, [SYSTEM, user("hello")])  # from now on the system prompt need not be computed
        whole = asked(inside, [SYSTEM, user("hello")])
        response = asked(inside, [SYSTEM, user("hello")], stream=True, stream_options={"include_usage": True})
    chunks = chunks_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == text_of(whole)
    assert chunks[-2]["choices"][0]["finish_reason"] == whole.json()["choices"][0]["finish_reason"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole.json()["usage"])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_stop_max_tokens_and_seed(tmp_path: Path):
    with client(service(tmp_path, max_tokens=12)) as inside:
        plain = asked(inside, [user("hello")])
        assert plain.json()["usage"]["completion_tokens"] <= 12
        stop = text_of(plain)[3:5]
        stopped = asked(inside, [user("hello")], stop=[stop, "never"]).json()
        assert stopped["choices"][0]["message"]["content"] == text_of(plain)[: text_of(plain).index(stop)]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        short = asked(inside, [user("hello")], max_tokens=3).json()
        assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (3, "length")
        drawn = [text_of(asked(inside, [user("hello")], temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_probabilities_of_tokens(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        response = asked(inside, [user("hello")], logprobs=True, top_logprobs=3, repetition_penalty=1)
        streamed = chunks_of(
            asked(inside, [user("hello")], logprobs=True, top_logprobs=3, repetition_penalty=1, stream=True)
        )
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == text_of(response)
    for each in content:
        assert each["logprob"] < 0
        assert bytes(each["bytes"]).decode() == each["token"]
        assert each["top_logprobs"][0]["token"] == each["token"], "greedy"
        assert [top["logprob"] for top in each["top_logprobs"]] == sorted(
            (top["logprob"] for top in each["top_logprobs"]), reverse=True
        )
    again = [each for chunk in streamed for c in chunk["choices"] if c["logprobs"] for each in c["logprobs"]["content"]]
    assert again == content


# Knowing again.


def test_a_regenerated_answer_stays_in_its_session(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        said, responses = talked(inside, 20)
        again = asked(inside, said[:-1], temperature=1.2, seed=3)
        assert again.headers["x-headwater-how"] == "edited"
        assert again.headers["x-headwater-session"] == responses[-1].headers["x-headwater-session"]
        follow = asked(inside, [*said[:-1], assistant(text_of(again)), user("and then?")])
        assert follow.headers["x-headwater-how"] == "continued"
        back = asked(inside, [*said, user("and then?")])
        assert back.headers["x-headwater-how"] == "edited", "the first answer again"
        assert int(back.headers["x-headwater-held"]) <= 300


def test_a_client_that_drops_its_oldest_messages(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        said, responses = talked(inside, 10)
        for dropped in (2, 3, 4):
            said += [user(f"more {dropped}")]
            kept = [SYSTEM, *said[1 + 2 * dropped :]]
            response = asked(inside, kept)
            assert response.headers["x-headwater-how"] == "shortened"
            assert response.headers["x-headwater-session"] == responses[0].headers["x-headwater-session"]
            assert int(response.headers["x-headwater-fed"]) < 60
            said += [assistant(text_of(response))]
        one_less = asked(inside, [SYSTEM, *said[4:], user("again")])
        assert one_less.headers["x-headwater-how"] == "shortened", "beginning with an answer"


def test_a_long_history_from_elsewhere_is_fed_as_far_as_it_fits(tmp_path: Path):
    history = [SYSTEM]
    for number in range(50):
        history += [user(f"question number {number}"), assistant(f"answer number {number}, at some length")]
    with client(service(tmp_path)) as inside:
        response = asked(inside, [*history, user("and now?")])
        assert (response.status_code, response.headers["x-headwater-how"]) == (200, "new")
        assert int(response.headers["x-headwater-fed"]) <= 300 + 60
        more = asked(inside, [*history, user("and now?"), assistant(text_of(response)), user("so?")])
        assert more.headers["x-headwater-how"] == "continued"


def test_two_clients_share_a_session_only_with_the_same_history(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        first, second = asked(inside, [SYSTEM, user("hi")]), asked(inside, [SYSTEM, user("hi")])
        assert first.headers["x-headwater-session"] != second.headers["x-headwater-session"]
        other = asked(inside, [SYSTEM, user("hi"), assistant("something else"), user("one")])
        sessions = {each.headers["x-headwater-session"] for each in (first, second, other)}
        assert len(sessions) == 3
        goes_on = asked(inside, [SYSTEM, user("hi"), assistant(text_of(first)), user("one")])
        assert goes_on.headers["x-headwater-session"] in sessions


def test_a_session_that_the_client_names(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        named = {"x-headwater-session": "anna%20k"}
        first = asked(inside, [SYSTEM, user("hi")], headers=named)
        assert first.headers["x-headwater-session"] == "anna k"
        only_new = asked(inside, [user("and more")], user="session:anna k")
        assert only_new.headers["x-headwater-how"] == "continued"
        assert only_new.json()["usage"]["prompt_tokens"] > first.json()["usage"]["total_tokens"]
        other = asked(inside, [SYSTEM, user("x"), assistant("y"), user("z")], headers=named)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "session_history_differs")
        two = asked(inside, [user("x")], headers=named, user="session:other")
        assert (two.status_code, two.json()["error"]["param"]) == (400, "user")
        path = asked(inside, [user("x")], headers={"x-headwater-session": "../etc"})
        assert path.status_code == 400


def test_a_session_comes_back_after_a_restart(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        said, responses = talked(inside, 12)
    with client(service(tmp_path)) as inside:
        response = asked(inside, [*said, user("still there?")])
    whole = Chat.open(FakeEngine(), system=SYSTEM["content"], budget=300, sampling=GREEDY, max_tokens=64)
    answers = ["".join(whole.send(m["content"])) for m in [*said, user("still there?")] if m["role"] == "user"]
    assert text_of(response) == answers[-1]
    assert response.headers["x-headwater-how"] == "continued"
    assert int(response.headers["x-headwater-fed"]) < 60, "from its snapshot"
    assert response.headers["x-headwater-session"] == responses[0].headers["x-headwater-session"]


# What is refused.

BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi", "tool_call_id": "1"}]}, "messages[0].role"),
    ({"messages": [user("hi"), SYSTEM, user("ho")]}, "messages[1].role"),
    ({"messages": [user("hi"), user("ho")]}, "messages[1].role"),
    ({"messages": [SYSTEM, SYSTEM, user("ho")]}, "messages[1].role"),
    ({"messages": [user("hi"), assistant("ho")]}, "messages[1].role"),
    ({"messages": [SYSTEM]}, "messages[0].role"),
    ({"messages": [assistant("ho"), user("hi")]}, "messages[0].role"),
    ({"messages": [user("  ")]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content",
    ),
    ({"messages": [user("hi")], "n": 2}, "n"),
    ({"messages": [user("hi")], "n": True}, "n"),
    ({"messages": [user("hi")], "tools": [{"type": "function"}]}, "tools"),
    ({"messages": [user("hi")], "logit_bias": {"1": 2}}, "logit_bias"),
    ({"messages": [user("hi")], "presence_penalty": 0.5}, "presence_penalty"),
    ({"messages": [user("hi")], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [user("hi")], "store": True}, "store"),
    ({"messages": [user("hi")], "surprise_me": 1}, "surprise_me"),
    ({"messages": [user("hi")], "temperature": 3}, "temperature"),
    ({"messages": [user("hi")], "temperature": "1"}, "temperature"),
    ({"messages": [user("hi")], "top_p": 0}, "top_p"),
    ({"messages": [user("hi")], "seed": -1}, "seed"),
    ({"messages": [user("hi")], "max_tokens": 0}, "max_tokens"),
    ({"messages": [user("hi")], "max_tokens": 10**9}, "max_tokens"),
    ({"messages": [user("hi")], "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"messages": [user("hi")], "top_logprobs": 2}, "top_logprobs"),
    ({"messages": [user("hi")], "stop": [""]}, None),
    ({"messages": [user("hi")], "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({}, "messages"),
]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory):
    with client(service(tmp_path_factory.mktemp("bad"))) as one:
        yield one


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_be_done_is_refused_by_name(inside, body: dict, param: str | None):
    response = inside.post("/v1/chat/completions", json={"model": "fake", **body})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] is not None and error["param"].startswith(param) if param else True, error
    assert set(error) == {"message", "type", "param", "code"}
    assert inside.get("/api/sessions").json()["sessions"] == [], "nothing was begun"


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"tools": []},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"store": False},
        {"stop": None, "seed": None, "user": "somebody", "stream": False},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_taken(tmp_path: Path, neutral: dict):
    with client(service(tmp_path)) as inside:
        assert asked(inside, [user("hi")], **neutral).status_code == 200


def test_another_model_is_not_there(inside):
    error = inside.post("/v1/chat/completions", json={"model": "gpt-9", "messages": [user("hi")]})
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert "'fake'" in error.json()["error"]["message"]
    assert inside.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert inside.get("/v1/models/fake").status_code == 200
    assert inside.get("/v1/models/a/b").status_code == 404


RAW = [
    (b"", 400),
    (b"{", 400),
    (b'{"model": "fake", "messages": "\xff"}', 400),
    (b"[" * 100_000, 400),
    (b'{"a":' * 50_000, 400),
    (b'{"model": "fake", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (b"null", 400),
    (b"NaN", 400),
]


@pytest.mark.parametrize(("body", "status"), RAW, ids=lambda value: str(value)[:40])
def test_a_body_that_is_no_request(inside, body: bytes, status: int):
    response = inside.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_nul_is_a_character_like_any_other(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        said, _ = talked(inside, 1, [SYSTEM, user("a\0b"), assistant("c\0d")])
    with client(service(tmp_path)) as inside:
        assert asked(inside, [*said, user("x")]).headers["x-headwater-how"] == "continued"
