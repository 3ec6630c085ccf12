"""Policies that look at attention, on every engine that supplies it: the stream's contract, a chat, a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.chat.sampling import Sampling
from headwater.chat.session import Chat
from headwater.engines.base import Engine
from headwater.errors import CacheStateError, SnapshotError, UnsupportedCall, UsageError
from headwater.policies import POLICIES, Policy, policy

IDS = [(index * 37 + index // 7) % 200 for index in range(300)]
SMALL: dict[str, dict[str, Any]] = {
    name: {"recent_window": 6} for name in ("h2o", "scissorhands", "snapkv", "pyramidkv")
} | {"tova": {}}
GREEDY = Sampling(temperature=0)


@pytest.fixture(params=SMALL)
def choice(request: pytest.FixtureRequest, engine: Engine) -> Policy[Any]:
    made = policy(request.param, budget=32, sinks=4, **SMALL[request.param])
    if not made.needs <= engine.supplies:
        pytest.skip(f"{engine.name} does not supply attention")
    return made


def test_every_policy_that_looks_at_attention_is_here():
    assert set(SMALL) == {name for name, kind in POLICIES.items() if kind().needs}


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_it_does_not_matter_how_a_text_is_cut(engine: Engine, choice: Policy[Any], size: int, tolerance: float):
    whole, cut = engine.open(choice), engine.open(choice)
    expected = whole.feed(IDS[:200])
    for start in range(0, 200, size):
        logits = cut.feed(IDS[start : min(200, start + size)])
    np.testing.assert_allclose(logits, expected, atol=tolerance)  # pyright: ignore[reportPossiblyUnboundVariable]
    np.testing.assert_array_equal(cut.kept, whole.kept)
    assert cut.seen == whole.seen == 200
    assert cut.nbytes == whole.nbytes
    assert set(range(4)) <= set(cut.kept.tolist())
    assert 32 <= len(cut.kept) <= 200
    assert cut.oldest(4) == min(position for position in cut.kept if position >= 4)


def test_scoring_is_feeding(engine: Engine, choice: Policy[Any], tolerance: float):
    fed, scored = engine.open(choice), engine.open(choice)
    logits = [fed.feed([token]) for token in IDS[:120]]
    scored.feed(IDS[:1])
    found = scored.score(IDS[1:120])
    expected = [row.astype(np.float64) for row in logits[:-1]]
    wanted = [row[token] - np.logaddexp.reduce(row) for row, token in zip(expected, IDS[1:120], strict=True)]
    np.testing.assert_allclose(found, wanted, atol=10 * tolerance)


@pytest.mark.parametrize("before", [0, 1, 20, 33, 150])
def test_what_comes_after_a_restore_is_the_same_to_the_bit(
    engine: Engine, choice: Policy[Any], before: int, tmp_path: Path
):
    stream = engine.open(choice)
    if before:
        stream.feed(IDS[:before])
    saved = stream.save(tmp_path / "s.safetensors")
    other = engine.restore(saved.path, choice).stream
    assert other.nbytes == stream.nbytes
    for token in IDS[before : before + 60]:
        np.testing.assert_array_equal(other.feed([token]), stream.feed([token]))
    np.testing.assert_array_equal(other.kept, stream.kept)


def test_a_snapshot_is_for_its_policy_alone(engine: Engine, choice: Policy[Any], tmp_path: Path):
    stream = engine.open(choice)
    stream.feed(IDS[:50])
    stream.save(tmp_path / "s")
    for other in (policy("streaming-llm", budget=32).live(), policy("tova", budget=31), None):
        with pytest.raises(SnapshotError, match="for another window"):
            engine.restore(tmp_path / "s", other)


def test_nothing_can_be_taken_out_from_outside(engine: Engine, choice: Policy[Any]):
    stream = engine.open(choice)
    stream.feed(IDS[:50])
    with pytest.raises(UsageError, match=f"{choice.name} picks what leaves"):
        stream.evict(1)
    stream.close()
    with pytest.raises(CacheStateError, match="closed"):
        stream.feed([1])


def test_what_is_taken_back_was_never_there(engine: Engine, choice: Policy[Any]):
    stream, plain = engine.open(choice), engine.open(choice)
    stream.feed(IDS[:5])
    plain.feed(IDS[:5])
    stream.feed(IDS[20:24])
    stream.rollback(4)
    assert stream.seen == 5
    with pytest.raises(UsageError, match="nothing predicts the first"):
        stream.score(IDS[5:6])
    np.testing.assert_allclose(stream.feed(IDS[5:50]), plain.feed(IDS[5:50]), atol=1e-4)
    assert stream.kept.tolist() == plain.kept.tolist()
    with pytest.raises(CacheStateError, match="the policy has learned"):
        stream.rollback(1)


def talk(chat: Chat, count: int, first: int = 0) -> list[str]:
    return ["".join(chat.send(f"message {index}")) for index in range(first, first + count)]


def test_a_chat_goes_on_in_its_budget_and_never_loses_its_prompt(engine: Engine, choice: Policy[Any]):
    made = policy(choice.name, budget=70, **SMALL[choice.name])
    with Chat.open(engine, system="Hi.", policy=made, sampling=GREEDY, max_tokens=8) as chat:
        talk(chat, 15)
        now = chat.stats()
        head = len(chat._talk.template.head)
        assert now.pinned == head
        assert set(range(head)) <= set(chat._talk.stream.kept.tolist())
        assert now.evicted_tokens == now.seen - now.held > 0
        assert chat._talk.first >= head
        assert "#" in chat.map() or "=" in chat.map()
        chat.reset()
        talk(chat, 2)


def test_a_session_goes_on_as_if_it_had_never_been_closed(engine: Engine, choice: Policy[Any], tmp_path: Path):
    made = policy(choice.name, budget=70, **SMALL[choice.name])
    options: dict[str, Any] = {"policy": made, "sampling": GREEDY, "max_tokens": 8}
    with Chat.open(engine, system="Hi.", **options) as whole:
        expected = talk(whole, 14)
    with Chat.open(engine, system="Hi.", session=tmp_path / "s.db", **options) as chat:
        assert talk(chat, 9) == expected[:9]
        assert chat.stats().trouble is None
    with Chat.restore(tmp_path / "s.db", engine) as again:
        assert again.stats().notice is None
        assert talk(again, 5, 9) == expected[9:]


def test_where_there_is_no_attention_it_is_refused_before_the_first_token(engine: Engine):
    if engine.supplies:
        pytest.skip(f"{engine.name} supplies attention")
    with pytest.raises(UnsupportedCall, match=r"tova needs attention.*would work: full, sliding-window, streaming-llm"):
        Chat.open(engine, policy="tova")
