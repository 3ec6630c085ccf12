"""Programs that people use with such a server: the `llm` command line, and what Open WebUI sends.

The requests of `openwebui.jsonl` have the fields and the order in which that program sends them: a chat as a stream,
its tasks (what to ask next, a title, tags) as single messages beside it, an answer again, an edited message. The
answers in them are those that the server gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headwater.engines.fake import FakeEngine
from headwater.server.service import Service
from tests.server.served import over_a_socket, service

LOG = Path(__file__).parents[1] / "data" / "openwebui.jsonl"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    served = service(tmp_path / "server", FakeEngine(context_length=65_536), budget=2000)
    with over_a_socket(served) as address:
        yield served, address


# Open WebUI.


def filled(value: Any, answers: list[str]) -> Any:
    """The request with the answers that were given."""
    text = json.dumps(value)
    for number, answer in enumerate(answers, start=1):
        text = text.replace(f"{{{{answer {number}}}}}", json.dumps(answer)[1:-1])
    assert "{{answer" not in text
    return json.loads(text)


def heard(response: httpx2.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def test_the_requests_of_a_chat_front_end(server: tuple[Service, str]):
    """Its tasks disturb no conversation; an answer again and an edited message stay in it."""
    answers: list[str] = []
    course: list[tuple[str, str]] = []
    sessions: set[str] = set()
    fed: list[int] = []
    with httpx2.Client(base_url=server[1], headers={"authorization": "Bearer none"}) as api:
        for line in LOG.read_text(encoding="utf-8").splitlines():
            sent = json.loads(line)
            body = filled(sent["body"], answers) if "body" in sent else None
            response = api.request(sent["method"], sent["path"], json=body)
            assert response.status_code == 200, (sent["what"], response.text)
            if sent["what"] == "models":
                assert response.json()["data"][0]["id"] == "fake"
                continue
            said = heard(response)
            assert said
            course.append((sent["what"], response.headers["x-headwater-how"]))
            if sent["what"] in ("chat", "regenerate", "edit"):
                answers.append(said)
                sessions.add(response.headers["x-headwater-session"])
                fed.append(int(response.headers["x-headwater-fed"]))
    assert course == [
        ("chat", "new"),
        ("follow-up", "new"),
        ("title", "new"),
        ("tags", "new"),
        ("chat", "continued"),
        ("follow-up", "new"),
        ("chat", "continued"),
        ("regenerate", "edited"),
        ("edit", "edited"),
        ("chat", "continued"),
    ]
    assert len(sessions) == 1
    assert max(fed[1:]) < 80, "the new message alone"
    (name,) = sessions
    shown = httpx2.get(f"{server[1]}/api/sessions/{name}").json()["messages"]
    assert [message["content"] for message in shown][-4:-2] == ["How many years did the whole voyage take?", answers[4]]


# The command line.


def llm(folder: Path, address: str, *arguments: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(
        f'- model_id: headwater\n  model_name: fake\n  api_base: "{address}/v1"\n', encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_line(server: tuple[Service, str], tmp_path: Path):
    folder = tmp_path / "llm"
    first = llm(folder, server[1], "-m", "headwater", "Where does the Beagle sail?")
    second = llm(folder, server[1], "-c", "And then?")
    third = llm(folder, server[1], "-c", "--no-stream", "-o", "max_tokens", "9", "And after that?")
    assert 0 < len(third) <= 9
    (session,) = httpx2.get(f"{server[1]}/api/sessions").json()["sessions"]
    shown = httpx2.get(f"{server[1]}/api/sessions/{session['name']}").json()["messages"]
    assert [message["content"].strip() for message in shown] == [
        "Where does the Beagle sail?",
        first,
        "And then?",
        second,
        "And after that?",
        third,
    ]
