"""Who may use the server, how much of it, and what it keeps to itself."""

from __future__ import annotations

import json
import logging
import socket
import stat
from pathlib import Path

import pytest

from headwater.errors import StoreError, UnknownName, UsageError
from headwater.server import serve
from headwater.server.keys import Keys
from headwater.server.limits import Limits, Use
from tests.server.served import SYSTEM, asked, assistant, client, over_a_socket, service, talked, text_of, user

# Keys.


def test_a_key_is_shown_once_and_kept_as_a_digest(tmp_path: Path):
    keys = Keys(tmp_path)
    given = keys.add("anna")
    text = keys.path.read_text()
    assert given not in text and given.removeprefix("hw-") not in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    found = Keys(tmp_path).find(given)
    assert found is not None and found.name == "anna" and found.id not in given
    for wrong in ("", given[:-1], given + "x", "hw-", found.sha256):
        assert keys.find(wrong) is None
    with pytest.raises(UsageError, match="'anna' already"):
        keys.add("anna")
    keys.remove("anna")
    assert keys.find(given) is None
    with pytest.raises(UnknownName, match="unknown key"):
        keys.remove("anna")


def test_a_file_that_holds_no_keys_lets_nobody_in(tmp_path: Path):
    keys = Keys(tmp_path)
    keys.add("anna")
    for wrong in ("{", "[1]", '[{"name": "a"}]'):
        keys.path.write_text(wrong)
        with pytest.raises(StoreError, match="does not hold keys"):
            keys.find("x")
    with client(service(tmp_path)) as inside:
        assert inside.get("/v1/models").status_code == 503


def test_sessions_of_two_keys_never_meet(tmp_path: Path):
    keys = Keys(tmp_path)
    one, two = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("one", "two"))
    with client(service(tmp_path)) as inside:
        assert asked(inside, [user("hi")]).status_code == 401
        for wrong in ("", "Bearer", "Bearer x", "Basic abc", one["authorization"][:-1]):
            response = asked(inside, [user("hi")], headers={"authorization": wrong})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        said, responses = talked(inside, 8, headers=one)
        name = responses[0].headers["x-headwater-session"]
        theirs = asked(inside, [*said, user("who said that?")], headers=two)
        assert theirs.headers["x-headwater-how"] == "new"
        assert inside.get(f"/api/sessions/{name}", headers=two).status_code == 404
        assert inside.get(f"/api/sessions/{name}", headers=one).status_code == 200
        assert inside.delete(f"/api/sessions/{name}", headers=two).status_code == 404
        named = asked(inside, [user("mine")], headers={**two, "x-headwater-session": name})
        assert named.headers["x-headwater-how"] == "new", "a name is a key's own"
        assert asked(inside, [*said, user("go on")], headers=one).headers["x-headwater-how"] == "continued"
        for path in ("/metrics", "/api/settings", "/v1/models"):
            assert inside.get(path).status_code == 401
        for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json"):
            assert inside.get(path).status_code == 200


def test_a_key_that_is_removed_is_no_key_any_more(tmp_path: Path):
    keys = Keys(tmp_path)
    keys.add("other")
    headers = {"authorization": f"Bearer {keys.add('anna')}"}
    with client(service(tmp_path)) as inside:
        assert inside.get("/v1/models", headers=headers).status_code == 200
        keys.remove("anna")
        assert inside.get("/v1/models", headers=headers).status_code == 401


def test_another_address_demands_a_key(tmp_path: Path):
    with pytest.raises(UsageError, match="headwater keys add"):
        run(tmp_path, host="0.0.0.0")


def run(folder: Path, **options: object) -> int:
    given = {
        "model": "fake",
        "engine": "fake",
        "host": "127.0.0.1",
        "port": 0,
        "policy": "streaming-llm",
        "budget": 300,
        "sinks": None,
        "max_tokens": 64,
        "memory": False,
        "memory_bytes": 1 << 20,
        "timeout_s": 60.0,
    }
    return serve.run(folder=folder, **{**given, **options})  # pyright: ignore[reportArgumentType]


def test_a_port_that_is_taken(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(serve.PortTaken, match=f"127.0.0.1 port {port}: .*--port"):
            run(tmp_path, port=port)


# Where a request comes from.


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8420", "localhost", "localhost:1", "[::1]:8420", "a.localhost"]
)
def test_this_machines_own_names(tmp_path: Path, host: str):
    with client(service(tmp_path)) as inside:
        assert inside.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "10.0.0.1", "a b"]
)
def test_a_name_that_points_here(tmp_path: Path, host: str):
    """A page can have its own name resolve to this machine, to read what a browser gets from it."""
    with client(service(tmp_path)) as inside:
        response = inside.get("/v1/models", headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")


def test_a_page_of_another_origin(tmp_path: Path):
    with client(service(tmp_path, origins=("http://localhost:3000",), hosts=("box.lan",))) as inside:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:99", "http://127.0.0.1.evil"):
            response = asked(inside, [user("hi")], headers={"origin": origin})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in response.headers
        own = asked(inside, [user("hi")], headers={"origin": "http://127.0.0.1"})
        assert own.status_code == 200
        allowed = asked(inside, [user("hi")], headers={"origin": "http://localhost:3000"})
        assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "x-headwater-session" in allowed.headers["access-control-expose-headers"]
        preflight = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
        assert inside.options("/v1/chat/completions", headers=preflight).status_code == 204
        assert inside.get("/healthz", headers={"host": "box.lan"}).status_code == 200


def test_a_form_of_another_page_is_no_request(tmp_path: Path):
    """What a browser sends without asking first has one of three content types."""
    with client(service(tmp_path)) as inside:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            body = json.dumps({"model": "fake", "messages": [user("hi")]})
            response = inside.post("/v1/chat/completions", content=body, headers={"content-type": kind})
            assert response.status_code == 400
        assert inside.get("/api/sessions").json()["sessions"] == []


def test_every_answer_keeps_a_browser_in_bounds(tmp_path: Path):
    with client(service(tmp_path)) as inside:
        for path in ("/", "/docs", "/static/page.js", "/nothing", "/v1/models"):
            headers = inside.get(path).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        for path in (
            "/static/../app.py",
            "/static/..%2fapp.py",
            "/static//etc/passwd",
            "/static/page.py",
            "/%2e%2e/app.py",
        ):
            assert inside.get(path).status_code == 404


# How much.


def test_a_body_that_is_too_large(tmp_path: Path):
    with client(service(tmp_path, body_bytes=2000)) as inside:
        response = asked(inside, [user("x" * 2000)])
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")

        def pieces():
            for _ in range(100):
                yield b"x" * 100

        response = inside.post("/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert asked(inside, [user("hi")]).status_code == 200


def test_fifty_megabytes_over_a_socket(tmp_path: Path):
    import httpx2

    with over_a_socket(service(tmp_path)) as address:
        response = httpx2.post(f"{address}/v1/chat/completions", content=b"x" * 50_000_000, timeout=30)
        assert response.status_code == 413
        assert httpx2.get(f"{address}/healthz").status_code == 200


def test_a_rate(tmp_path: Path):
    with client(service(tmp_path, limits=Limits(requests_per_minute=5))) as inside:
        codes = [inside.get("/v1/models").status_code for _ in range(7)]
        assert codes == [200] * 5 + [429] * 2
        response = inside.get("/v1/models")
        assert (response.json()["error"]["type"], int(response.headers["retry-after"]) > 0) == (
            "rate_limit_exceeded",
            True,
        )
        assert inside.get("/healthz").status_code == 200


def test_a_bucket_fills_evenly():
    now = [0.0]
    use = Use(limits=Limits(requests_per_minute=60), clock=lambda: now[0])
    assert [use.request() for _ in range(60)] == [0.0] * 60
    assert use.request() == pytest.approx(1.0)
    now[0] = 0.5
    assert use.request() == pytest.approx(0.5)
    now[0] = 1.0
    assert use.request() == 0.0
    now[0] = -100.0  # a clock that jumps gives nothing and takes nothing
    assert use.request() > 0
    now[0] = 1000.0
    assert [use.request() for _ in range(61)][-1] > 0


def test_tokens_under_way(tmp_path: Path):
    with client(service(tmp_path, limits=Limits(tokens_in_flight=50))) as inside:
        assert asked(inside, [user("hi")], max_tokens=51).status_code == 429
        for _ in range(3):
            assert asked(inside, [user("hi")], max_tokens=50).status_code == 200, "given back at the end"


def test_a_number_of_sessions(tmp_path: Path):
    with client(service(tmp_path, limits=Limits(sessions=2))) as inside:
        first = asked(inside, [SYSTEM, user("one")])
        asked(inside, [SYSTEM, user("two")])
        third = asked(inside, [SYSTEM, user("three")])
        assert (third.status_code, third.json()["error"]["code"]) == (429, "too_many_sessions")
        said = [SYSTEM, user("one"), assistant(text_of(first)), user("more")]
        assert asked(inside, said).status_code == 200
        inside.delete(f"/api/sessions/{first.headers['x-headwater-session']}")
        assert asked(inside, [SYSTEM, user("three")]).status_code == 200


# What is kept to itself.


def test_no_word_of_a_conversation_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.DEBUG)
    secret = "xyzzyplugh"
    with client(service(tmp_path)) as inside:
        asked(inside, [SYSTEM, user(secret)])
        asked(inside, [user(secret), user(secret)])
        asked(inside, [user(secret)], colour=secret)
        inside.get(f"/api/sessions/{secret}")

        def broken(self: object, *_: object, **__: object) -> None:
            raise RuntimeError(f"what was said: {secret}")

        monkeypatch.setattr("headwater.server.sessions.Sessions.take", broken)
        response = asked(inside, [user(secret)])
        assert response.status_code == 500
        assert secret not in response.text
        assert response.json()["error"]["type"] == "server_error"
    assert "a defect: RuntimeError at " in caplog.text
    assert secret not in "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("headwater")
    )


def test_a_defect_of_an_endpoint_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with client(service(tmp_path)) as inside:
        monkeypatch.setattr("headwater.server.chat_api.history_of", lambda *_: 1 / 0)
        response = asked(inside, [user("hi")])
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "division" not in response.text
