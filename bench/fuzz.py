"""Requests that nobody would send, for as long as is wanted: `python -m bench.fuzz --minutes 10`.

The server runs on the fake engine in a process of its own. Requests are made of the OpenAPI document's own fields with
values of every kind, of mutilated JSON, and of bytes. It fails at the first answer of 500, at one that takes longer
than `SLOWEST_S`, and when the server does not end with exit code 0. The seed is printed, and makes the same requests
again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import httpx2

from bench.server import serving

SLOWEST_S = 20.0
TEXTS = [
    "",
    " ",
    "hi",
    "a\0b",
    "é🙂 日本",
    "x" * 5000,
    "<|im_end|>",
    "../../etc/passwd",
    "session:a",
    "%00",
    "\u202e",
    "fake",
]
ROLES = ["system", "developer", "user", "assistant", "tool", "function", "", "USER", None, 7]


def value(dice: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kind = dice.randrange(10 if depth < 4 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return dice.random() < 0.5
    if kind == 2:
        return dice.choice([0, 1, -1, 2, 3, 10**6, 10**30, -(10**30)])
    if kind == 3:
        return dice.choice([0.0, 0.5, -0.5, 1e308, 1e-308])
    if kind < 7:
        return dice.choice(TEXTS)
    if kind == 7:
        return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {
        dice.choice([*TEXTS, "type", "role", "content", "text"]): value(dice, depth + 1)
        for _ in range(dice.randrange(4))
    }


def messages(dice: random.Random) -> Any:
    """Messages, most of them nearly right."""
    if dice.random() < 0.1:
        return value(dice)
    roles = dice.choice([["user"], ["system", "user"], ["user", "assistant", "user"], dice.choices(ROLES, k=3)])
    return [
        {
            "role": role,
            "content": dice.choice(TEXTS) if dice.random() < 0.8 else value(dice),
            **({dice.choice(["name", "tool_calls", "x"]): value(dice)} if dice.random() < 0.1 else {}),
        }
        for role in roles
    ]


def body(dice: random.Random, fields: list[str]) -> Any:
    """The body of a request."""
    out: dict[str, Any] = {"model": "smollm2", "max_tokens": dice.choice([1, 5, 30])}
    if "messages" in fields:
        out["messages"] = messages(dice)
    if "prompt" in fields:
        out["prompt"] = dice.choice([*TEXTS, value(dice)])
    if "input" in fields:
        out = {"model": dice.choice(["smollm2", "wordllama-l2-supercat-256"])}
        out["input"] = dice.choice([*TEXTS, messages(dice), value(dice)])
    for _ in range(dice.choice([0, 0, 0, 1, 2])):
        out[dice.choice([*fields, "nonsense"])] = value(dice)
    return out


def mutilated(dice: random.Random, content: bytes) -> bytes:
    """The same with something gone, doubled or changed."""
    at = dice.randrange(len(content) + 1)
    kind = dice.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(dice.randrange(256) for _ in range(8)) + content[at:]
    if kind == 2:
        return content[:at] + content[at:] * 2
    if kind == 3:
        return b"[" * dice.choice([10, 1000, 100_000]) + content
    return content.replace(b'"', b"'", 1)


def one(dice: random.Random, api: httpx2.Client, paths: list[tuple[str, str, list[str]]]) -> httpx2.Response:
    """Send one request."""
    method, path, fields = dice.choice(paths)
    for name in ("{name}", "{response}", "{model}"):
        path = path.replace(name, dice.choice(["chat-1", "resp_a_1_1", "a b", "%2e%2e", "x" * 300, "%00", "smollm2"]))
    headers = {"content-type": dice.choice(["application/json"] * 9 + ["text/plain"])}
    if dice.random() < 0.3:
        headers["x-headwater-session"] = dice.choice(["a", "b", "../x", "%ff", "a%20b", "x" * 100])
    if dice.random() < 0.1:
        headers["x-headwater-history"] = dice.choice(["whole", "half"])
    content = json.dumps(body(dice, fields)).encode() if method in ("POST", "PUT", "PATCH") else b""
    if content and dice.random() < 0.15:
        content = mutilated(dice, content)
    return api.request(method, path, content=content, headers=headers)


def main() -> None:
    """Send requests until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    dice, codes = random.Random(seed), dict[int, int]()
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    with (
        serving("--engine", "fake", "--budget", "300", "--max-tokens", "30") as served,
        httpx2.Client(base_url=served.address, timeout=SLOWEST_S) as api,
    ):
        document = api.get("/openapi.json").json()
        paths = [
            (method.upper(), path, _fields(document, operation))
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        end = time.monotonic() + options.minutes * 60
        while time.monotonic() < end:
            response = one(dice, api, paths)
            codes[response.status_code] = codes.get(response.status_code, 0) + 1
            assert response.status_code < 500 or response.status_code == 503, (seed, response.request, response.text)
        assert api.get("/readyz").status_code == 200
    print(json.dumps({"seed": seed, "requests": sum(codes.values()), "codes": dict(sorted(codes.items()))}))


def _fields(document: Any, operation: Any) -> list[str]:
    """The names of what a body may hold."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return list(document["components"]["schemas"][name]["properties"]) if name else ["nothing"]


if __name__ == "__main__":
    main()
