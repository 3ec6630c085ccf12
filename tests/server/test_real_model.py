"""The whole of it once: the `openai` client, a socket, the real model, past its window."""

from __future__ import annotations

import threading
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


def test_conversations_that_are_computed_together_say_what_each_says_alone(tmp_path: Path):
    """Three at once, in a window that they pass: the weights are read once for them, and nobody hears another."""
    engine: Any = open_engine("smollm2")
    assert engine.apart is None
    questions = [pair.question for pair in load(None).exchanges[:5]]
    expected: list[list[str]] = []
    for number in range(3):
        chat = Chat.open(engine, budget=BUDGET, sampling=GREEDY, max_tokens=TOKENS)
        expected.append(["".join(chat.send(question)) for question in questions[number : number + 3]])
        assert chat.stats().evicted_turns > 0
        chat.close()
    rows: list[int] = []
    engine.model.get_input_embeddings().register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
    answers: list[list[str]] = [[], [], []]
    served = service(tmp_path, engine, budget=BUDGET, max_tokens=TOKENS)
    with over_a_socket(served) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as api:

        def talk(number: int) -> None:
            messages: list[Any] = []
            for question in questions[number : number + 3]:
                messages.append(user(question))
                answer = api.chat.completions.create(model="smollm2", messages=messages).choices[0].message.content
                answers[number].append(answer or "")
                messages.append({"role": "assistant", "content": answer})

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == expected
    assert rows.count(3) > 10
    engine.close()
