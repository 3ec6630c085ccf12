"""The published conformance cases: one file per policy, one test per case."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwater.policies import POLICIES, Incremental, policy

FOLDER = Path(__file__).parents[1] / "data" / "policies"
HAS_NO_PUBLISHED_CASES = {"full", "random"}


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def cases() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
            found.append(pytest.param(path.stem, case, id=f"{path.stem}: {case['name']}"))
    return found


@pytest.mark.parametrize(("name", "case"), cases())
def test_published_case(name: str, case: dict[str, Any]) -> None:
    parameters = {snake(parameter): value for parameter, value in case["params"].items()}
    row = Incremental(policy(name, **parameters))
    compared = 0
    for call in case["steps"]:
        method = snake(call["call"])
        if method in ("on_decode_step", "evict", "kept_count"):
            got = getattr(row, method)(*call["args"])
        else:
            got = row.report(method, *call["args"])
        if "expect" in call:
            assert got == (call["expect"] if method == "evict" else pytest.approx(call["expect"], abs=1e-9)), call
            compared += 1
    assert compared, "a case that compares nothing proves nothing"


def test_every_policy_has_its_cases() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} | HAS_NO_PUBLISHED_CASES == set(POLICIES)


def test_the_files_are_complete() -> None:
    assert len(cases()) == 44
