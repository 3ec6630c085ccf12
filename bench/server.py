"""What the server costs, and what it holds: `python -m bench.server`.

The server is a process of its own, the client is the `openai` package in this one. Rivals alternate, figures are
medians.

- `overhead`: time per streamed token over that of the in-process chat, less 1, at one session; at most 0.05.
- `ttft_150_over_10`: time to the first token of turns 145 to 155 of a conversation that is sent whole with every
  message, over that of turns 5 to 15; at most 1.2.
- `batch_8_over_1`: tokens a second of eight conversations together over those of one; at least 3. `fairness`: the
  slowest of the eight over the fastest; at least 0.8.
- `idle`: sessions on the disk, and the caches and the server's process while eight of them are talked to.
- `soak`: requests on the fake engine: bytes that the process grew by, messages lost, answers that were not 200.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import torch

from bench.clock import take
from headwater.bench.conversation import load
from headwater.bench.machine import hardware, now, versions
from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.chat.store import Store
from headwater.engines import open_engine

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "server.json"
MAIN = "import sys; from headwater.cli import main; sys.exit(main())"


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str, folder: Path) -> None:
        self.process, self.address, self.folder = process, address, folder
        self.api = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
        self.model = self.api.models.list().data[0].id

    @property
    def resident(self) -> int:
        """Bytes that the process has in memory."""
        return psutil.Process(self.process.pid).memory_info().rss

    def stream(self, messages: list[Any], tokens: int) -> tuple[str, list[float]]:
        """An answer, and when each of its pieces came after the request."""
        began, times, text = time.perf_counter(), [], ""
        for chunk in self.api.chat.completions.create(
            model=self.model, messages=messages, max_tokens=tokens, stream=True, temperature=0
        ):
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                times.append(time.perf_counter() - began)
                text += piece
        return text, times


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """`headwater serve` with a folder of its own; it has to end with exit code 0."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "serve", "--port", "0", "--requests-per-minute", "1000000", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HEADWATER_DATA_DIR": folder},
        )
        try:
            yield Served(process, _address(process), Path(folder) / "server")
        finally:
            process.terminate()
            code = process.wait(120)
        assert code == 0, f"the server ended with {code}"


def _address(process: subprocess.Popen[str]) -> str:
    """Where it says that its page is, once it answers."""
    assert process.stdout is not None
    line = next(line for line in iter(process.stdout.readline, "") if line.startswith("page"))
    address = line.split()[1].rstrip("/")
    while True:
        try:
            httpx2.get(f"{address}/readyz").raise_for_status()
            return address
        except httpx2.TransportError:
            time.sleep(0.05)


def overhead(served: Served, *, rounds: int, tokens: int) -> dict[str, Any]:
    """The same answers in process and over a socket, in turn."""
    engine = open_engine("smollm2")
    per_token: dict[str, list[float]] = {"process": [], "server": []}
    for pair in load(None).exchanges[:rounds]:
        chat = Chat.open(engine, budget=1024, sampling=Sampling(temperature=0), max_tokens=tokens)
        times = [time.perf_counter() for piece in chat.send(pair.question) if piece]
        chat.close()
        per_token["process"].append((times[-1] - times[0]) / (len(times) - 1))
        _, times = served.stream([{"role": "user", "content": pair.question}], tokens)
        per_token["server"].append((times[-1] - times[0]) / (len(times) - 1))
    engine.close()
    ratios = [s / p for s, p in zip(per_token["server"], per_token["process"], strict=True)]
    return {
        "overhead": statistics.median(ratios) - 1,
        "overhead_seconds_per_token": {name: statistics.median(values) for name, values in per_token.items()},
        "overhead_rounds": rounds,
    }


def first_token(served: Served, *, turns: int, tokens: int) -> dict[str, Any]:
    """A conversation that is sent whole with every message."""
    messages: list[Any] = [{"role": "system", "content": "You are brief."}]
    firsts, questions = [], [pair.question for pair in load(None).exchanges]
    for turn in range(turns):
        messages.append({"role": "user", "content": questions[turn % len(questions)]})
        text, times = served.stream(messages, tokens)
        messages.append({"role": "assistant", "content": text})
        firsts.append(times[0])
    late, early = (statistics.median(firsts[at - 5 : at + 6]) for at in (turns * 3 // 4, max(6, turns // 20)))
    return {"ttft_150_over_10": late / early, "ttft_seconds": [early, late], "ttft_turns": turns}


def together(served: Served, *, clients: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One conversation, then as many at a time; all from the request to the last token."""

    def talk(number: int, into: list[tuple[int, float]]) -> None:
        messages = [{"role": "user", "content": f"Tell me a long story about the number {number}."}]
        text, times = served.stream(messages, tokens)
        into.append((len(times), times[-1]))
        assert text

    def at_once(numbers: range) -> tuple[float, float]:
        """Tokens a second of all, and the slowest of them over the fastest."""
        told: list[tuple[int, float]] = []
        threads = [threading.Thread(target=talk, args=(number, told)) for number in numbers]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole = time.perf_counter() - began
        rates = [count / seconds for count, seconds in told]
        return sum(count for count, _ in told) / whole, min(rates) / max(rates)

    at_once(range(1))
    ones, alls, fair = [], [], []
    for number in range(rounds):
        first = 1 + number * (clients + 1)
        ones.append(at_once(range(first, first + 1))[0])
        total, fairness = at_once(range(first + 1, first + 1 + clients))
        alls.append(total)
        fair.append(fairness)
    return {
        "batch_8_over_1": statistics.median(a / o for a, o in zip(alls, ones, strict=True)),
        "fairness": statistics.median(fair),
        "tokens_per_s": {"one": statistics.median(ones), "together": statistics.median(alls)},
        "clients": clients,
        "together_rounds": rounds,
    }


def idle(*, sessions: int, limit: str) -> dict[str, Any]:
    """Many sessions that said a word once, and eight of them that go on, all at a time."""
    with serving("--budget", "512", "--memory-limit", limit) as served:
        talks: list[list[Any]] = [[{"role": "user", "content": f"I am client {number}."}] for number in range(sessions)]
        gone_on: list[str] = []

        def say(talk: list[Any], tokens: int) -> None:
            raw = served.api.chat.completions.with_raw_response.create(
                model=served.model, messages=talk, max_tokens=tokens, temperature=0
            )
            gone_on.append(raw.headers["x-headwater-how"])
            talk.append({"role": "assistant", "content": raw.parse().choices[0].message.content})

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(lambda talk: say(talk, 2), talks))
            before = served.resident
            gone_on.clear()
            active = talks[:: max(1, sessions // 8)][:8]
            for _ in range(5):
                for talk in active:
                    talk.append({"role": "user", "content": "and on?"})
                list(clients.map(lambda talk: say(talk, 16), active))
        figures = httpx2.get(f"{served.address}/metrics").text
        shown = dict(line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#"))
        return {
            "idle": {
                "sessions": int(float(shown["headwater_sessions"])),
                "in_memory": int(float(shown["headwater_sessions_in_memory"])),
                "limit": limit,
                "cache_bytes": int(float(shown["headwater_cache_bytes"])),
                "resident_bytes": [before, served.resident],
                "gone_on_with": [gone_on.count("continued"), len(gone_on)],
            }
        }


def soak(*, requests: int, clients: int = 4) -> dict[str, Any]:
    """Conversations of twenty messages, one after the other, by several clients at a time."""
    with serving("--engine", "fake", "--budget", "512", "--memory-limit", "64MiB") as served:
        codes: dict[int, int] = {}
        told: list[tuple[str, str]] = []
        resident: list[int] = []
        lock = threading.Lock()

        def talk(client: int) -> None:
            with httpx2.Client(base_url=served.address, timeout=60) as api:
                messages: list[Any] = []
                for count in range(requests // clients):
                    if count % 20 == 0:
                        messages = []
                    messages.append({"role": "user", "content": f"client {client}, message {count}"})
                    body = {"model": served.model, "messages": messages, "max_tokens": 8, "temperature": 0}
                    response = api.post("/v1/chat/completions", json=body)
                    with lock:
                        codes[response.status_code] = codes.get(response.status_code, 0) + 1
                        if response.status_code == 200:
                            answer = response.json()["choices"][0]["message"]["content"]
                            messages.append({"role": "assistant", "content": answer})
                            told.append((messages[-2]["content"], answer))
                        if sum(codes.values()) in (requests // 5, requests // clients * clients):
                            resident.append(served.resident)

        threads = [threading.Thread(target=talk, args=(client,)) for client in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = [said.texts for said in Store(served.folder / "local.db").said()]
        pairs = {(texts[at], texts[at + 1]) for texts in kept for at in range(0, len(texts) - 1, 2)}
        return {
            "soak": {
                "requests": sum(codes.values()),
                "codes": codes,
                "messages_lost": sum(pair not in pairs for pair in told),
                "resident_bytes_at_a_fifth_and_at_the_end": resident,
            }
        }


def main() -> None:
    """Measure, and store the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of everything, to see that it runs; stores nothing"
    )
    options = parser.parse_args()
    part = 10 if options.quick else 1
    print(f"{now()} {hardware()}\n{versions()}, {torch.get_num_threads()} threads")
    figures: dict[str, Any] = {"started": now(), "hardware": hardware(), "versions": versions(), "seed": None}
    figures["threads"] = torch.get_num_threads()
    with serving("--budget", "1024") as served:
        take(figures, overhead(served, rounds=max(2, 14 // part), tokens=48))
        take(figures, together(served, clients=8, tokens=max(8, 128 // part), rounds=max(1, 3 // part)))
    with serving("--budget", "512") as served:
        take(figures, first_token(served, turns=200 // part, tokens=8))
    take(figures, idle(sessions=500 // part, limit="1GiB"))
    take(figures, soak(requests=10_000 // part))
    if not options.quick:
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if isinstance(value, int | float)}))


if __name__ == "__main__":
    main()
