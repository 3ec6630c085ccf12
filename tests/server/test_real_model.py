"""The whole of it once: the `openai` client, a socket, the real model, past its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from headwater.bench.conversation import load
from headwater.chat.session import Chat
from headwater.engines import open_engine
from tests.server.served import GREEDY, over_a_socket, service, user

pytestmark = pytest.mark.real_model
BUDGET, TOKENS = 100, 8


def test_a_conversation_with_the_real_model(tmp_path: Path):
    engine = open_engine("smollm2")
    questions = [pair.question for pair in load(None).exchanges[:5]]
    chat = Chat.open(engine, system="You are brief.", budget=BUDGET, sampling=GREEDY, max_tokens=TOKENS)
    expected = ["".join(chat.send(question)) for question in questions]
    assert chat.stats().evicted_turns > 0
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    fed, answers = [], []
    served = service(tmp_path, engine, budget=BUDGET, max_tokens=TOKENS)
    with over_a_socket(served) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as api:
        for question in questions:
            messages.append(user(question))
            raw = api.chat.completions.with_raw_response.create(model="smollm2", messages=messages)
            answers.append(raw.parse().choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
            fed.append(int(raw.headers["x-headwater-fed"]))
        assert answers == expected
        assert sum(fed) + TOKENS * len(answers) < 1.5 * chat.stats().seen, "every token once"
        (live,) = served.shelf.all()
        assert live.chat.stats().evicted_turns == chat.stats().evicted_turns
    with over_a_socket(service(tmp_path, engine, budget=BUDGET, max_tokens=TOKENS)) as address:
        messages.append(user("And then?"))
        api = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        raw = api.chat.completions.with_raw_response.create(model="smollm2", messages=messages)
        assert raw.parse().choices[0].message.content == "".join(chat.send("And then?")), "after a restart, too"
        assert raw.headers["x-headwater-how"] == "continued"
        api.close()
    engine.close()
