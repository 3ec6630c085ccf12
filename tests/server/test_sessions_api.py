"""Sessions, settings and the state of the server, in process on the fake engine."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headwater.engines.fake import FakeEngine
from tests.server.served import SYSTEM, asked, assistant, client, service, talked, text_of, user


def test_what_a_session_holds(tmp_path: Path):
    served = service(tmp_path)
    with client(served) as inside:
        said, responses = talked(inside, 12)
        name = responses[0].headers["x-headwater-session"]
        shown = inside.get(f"/api/sessions/{name}").json()
        stats = served.shelf.all()[0].chat.stats()
    state = shown["state"]
    assert (state["seen"], state["held"], state["sinks"], state["busy"]) == (stats.seen, stats.held, 4, False)
    assert state["surprise"] > 0
    assert shown["system"] == "You are brief."
    assert [message["content"] for message in shown["messages"]] == [message["content"] for message in said[1:]]
    assert [message["held"] for message in shown["messages"]] == [n >= stats.evicted_turns for n in range(24)]
    held = sum(message["tokens"] for message in shown["messages"] if message["held"])
    assert held == stats.held - stats.pinned


def test_sessions_are_listed_searched_renamed_exported_and_deleted(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        for text in ("about a BOAT", "about a train"):
            asked(inside, [user(text)])
        listed = inside.get("/api/sessions").json()["sessions"]
        assert [each["title"] for each in listed] == ["about a train", "about a BOAT"]
        assert all(each["in_memory"] and not each["busy"] for each in listed)
        (found,) = inside.get("/api/sessions", params={"search": "boat"}).json()["sessions"]
        assert inside.patch(f"/api/sessions/{found['name']}", json={"name": "the boat"}).json() == {"name": "the boat"}
        assert inside.get(f"/api/sessions/{found['name']}").status_code == 404
        again = asked(inside, [user("about a BOAT"), assistant(_answer(inside, "the boat")), user("more")])
        assert again.headers["x-headwater-session"] == "the boat"
        assert again.headers["x-headwater-how"] == "continued"
        lines = inside.get("/api/sessions/the boat/export").text.splitlines()
        assert [json.loads(line).get("role") for line in lines] == [None, "user", "assistant", "user", "assistant"]
        assert "**user**" in inside.get("/api/sessions/the boat/export", params={"kind": "markdown"}).text
        taken = inside.patch("/api/sessions/the boat", json={"name": listed[0]["name"]})
        assert (taken.status_code, "already" in taken.json()["error"]["message"]) == (400, True)
        assert inside.get("/api/sessions/the boat").json()["in_memory"] is False
        assert inside.delete("/api/sessions/the boat").status_code == 204
        assert inside.delete("/api/sessions/the boat").status_code == 404
        assert len(inside.get("/api/sessions").json()["sessions"]) == 1


def _answer(inside: Any, name: str) -> str:
    return inside.get(f"/api/sessions/{name}").json()["messages"][1]["content"]


def test_other_settings_make_caches_again(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        said, _ = talked(inside, 10)
        before = inside.get("/api/settings").json()
        assert (before["budget"], before["session_bytes"]) == (300, 301 * 8)
        after = inside.put("/api/settings", json={"budget": 150}).json()
        assert (after["budget"], after["session_bytes"], after["policy"]) == (150, 151 * 8, "streaming-llm")
        response = asked(inside, [*said, user("and now?")])
        assert response.headers["x-headwater-how"] == "continued"
        assert int(response.headers["x-headwater-held"]) <= 150
        for wrong, status in (
            ({"budget": 10}, 400),
            ({"policy": "lru"}, 404),
            ({"policy": "h2o"}, 400),
            ({"policy": "full", "sinks": 3}, 400),
            ({"budget": 10**9}, 400),
            ({"colour": 1}, 400),
        ):
            assert inside.put("/api/settings", json=wrong).status_code == status, wrong
        assert inside.get("/api/settings").json()["budget"] == 150
        assert asked(inside, [user("hi")]).status_code == 200


def test_settings_are_not_for_those_with_a_key(tmp_path: Path):
    served = service(tmp_path)
    headers = {"authorization": f"Bearer {served.keys.add('anna')}"}
    with client(served) as inside:
        assert inside.put("/api/settings", json={"budget": 150}, headers=headers).status_code == 403
        assert inside.get("/api/settings", headers=headers).json()["budget"] == 300


def test_memory_brings_back_what_has_left(tmp_path: Path):
    with client(service(tmp_path, budget=700, memory=True, memory_tokens=300)) as inside:
        said: list[Any] = [user("my boat is called Ariel")]
        for _ in range(30):
            said += [assistant(text_of(asked(inside, said))), user("and so on, and so forth, at some length")]
        said[-1] = user("what is my boat called?")
        response = asked(inside, said)
        recalled = response.json()["headwater"]["recalled"]
        assert recalled and recalled[0].startswith("turn 1")
        shown = inside.get(f"/api/sessions/{response.headers['x-headwater-session']}").json()
        assert shown["messages"][-2]["recalled"] == len(recalled)
        assert shown["messages"][-2]["content"] == "what is my boat called?"
        counted = re.search(r"headwater_recalled_passages_total ([\d.]+)", inside.get("/metrics").text)
        assert counted is not None and float(counted[1]) >= len(recalled)


def test_what_is_deleted_is_remembered_by_nobody(tmp_path: Path):
    with client(service(tmp_path, budget=700, memory=True, memory_tokens=300)) as inside:
        names = []
        for word in ("xyzzy", "plugh"):
            said: list[Any] = [user(f"my boat is called {word}")]
            for _ in range(20):
                said += [assistant(text_of(asked(inside, said))), user("and so on, and so forth, at some length")]
            names.append(asked(inside, said).headers["x-headwater-session"])
        assert b"xyzzy" in everything(tmp_path)
        assert inside.delete(f"/api/sessions/{names[0]}").status_code == 204
        said[-1] = user("what is my boat called?")
        assert asked(inside, said).json()["headwater"]["recalled"]
    with sqlite3.connect(tmp_path / "local.db") as rows:
        for table in ("passages", "turns"):
            assert rows.execute(f"SELECT count(*) FROM {table} WHERE text LIKE '%xyzzy%'").fetchone() == (0,)
            assert rows.execute(f"SELECT count(*) FROM {table} WHERE text LIKE '%plugh%'").fetchone() > (0,)
    rows.close()


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_figures(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        _, responses = talked(inside, 12)
        asked(inside, [user("hi")], n=2)
        figures = {
            name: float(number)
            for name, _, number in (line.rpartition(" ") for line in inside.get("/metrics").text.splitlines())
            if not name.startswith("#")
        }
    usage = [response.json()["usage"] for response in responses]
    assert figures['headwater_requests_total{endpoint="/v1/chat/completions",status="200"}'] == 12
    assert figures['headwater_requests_total{endpoint="/v1/chat/completions",status="400"}'] == 1
    assert figures['headwater_tokens_total{kind="generated"}'] == sum(each["completion_tokens"] for each in usage)
    assert figures['headwater_tokens_total{kind="prompt"}'] == sum(each["prompt_tokens"] for each in usage)
    assert figures['headwater_tokens_total{kind="fed"}'] == sum(int(r.headers["x-headwater-fed"]) for r in responses)
    evicted = responses[-1].json()["headwater"]["evicted_tokens"]
    assert figures['headwater_tokens_total{kind="evicted"}'] == evicted > 0
    assert figures['headwater_histories_total{how="continued"}'] == 11
    assert figures["headwater_first_token_seconds_count"] == 12
    assert figures["headwater_held_tokens"] == figures["headwater_cache_bytes"] / 8
    assert (figures["headwater_sessions"], figures["headwater_sessions_in_memory"]) == (1, 1)
    assert (figures["headwater_active"], figures["headwater_waiting"]) == (0, 0)


def test_ready_and_alive(tmp_path: Path):
    served = service(tmp_path, FakeEngine(name="fake"))
    with client(served) as inside:
        assert inside.get("/healthz").json() == {"status": "ok"}
        assert inside.get("/readyz").json() == {"status": "ready", "model": "fake"}
        served.draining = True
        assert (inside.get("/readyz").status_code, inside.get("/healthz").status_code) == (503, 200)
        assert asked(inside, [SYSTEM, user("hi")]).status_code == 503


def test_the_document_names_every_endpoint(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        document = inside.get("/openapi.json").json()
    table = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    for path in document["paths"]:
        assert f"{path.removesuffix('/export')}" in table or path.startswith(("/readyz", "/metrics", "/v1/models/")), (
            path
        )


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/chat", "/api", "/static/"])
def test_what_is_not_there(tmp_path: Path, path: str):
    with client(service(tmp_path)) as inside:
        response = inside.get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
        wrong = inside.get("/v1/chat/completions")
        assert (wrong.status_code, "error" in wrong.json()) == (405, True)
