"""One small engine of every kind, for the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from headwater.engines import open_engine
from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine
from tests import tiny_gguf
from tests.llamacpp import require_llamacpp
from tests.mlx import require_mlx

CONTEXT_LENGTH = 128


def fake() -> Engine:
    return FakeEngine(context_length=CONTEXT_LENGTH)


def transformers() -> Engine:
    """A random Llama of two layers and a tokenizer of single bytes."""
    torch = pytest.importorskip("torch")
    host = pytest.importorskip("transformers")
    from headwater.engines.transformers import TransformersEngine

    config = host.LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = host.LlamaForCausalLM(config).eval()
    return TransformersEngine(model, byte_tokenizer(), name="tiny")


def byte_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=tiny_gguf.CHATML)


def llamacpp() -> Engine:
    """The same kind of model in a GGUF file; keys and values in float32, so that a wrong position shows beside no
    rounding. Two conversations share a context."""
    return llamacpp_engine(type_k="f32", type_v="f32", flash_attn="off", n_seq_max=2)


def llamacpp_as_used() -> Engine:
    """The same with the defaults."""
    return llamacpp_engine()


def llamacpp_engine(**options: Any) -> Engine:
    require_llamacpp()
    with TemporaryDirectory() as folder:
        file = tiny_gguf.write(Path(folder) / "tiny.gguf", context_length=CONTEXT_LENGTH)
        return open_engine(str(file), engine="llamacpp", n_threads=1, **options)


def mlx() -> Engine:
    """The same kind of model, in float32."""
    require_mlx()
    with TemporaryDirectory() as folder:
        file = tiny_gguf.write(Path(folder) / "tiny.gguf", context_length=CONTEXT_LENGTH)
        return open_engine(str(file), engine="mlx", dtype="float32")


@dataclass(frozen=True, slots=True)
class Kind:
    """How an engine is built, and how exact it is."""

    build: Callable[[], Engine]

    tolerance: float
    """How far logits may differ between two ways of feeding the same tokens."""

    saved_tolerance: float
    """The same after a restore. llamacpp puts cells side by side that had holes between them: another order of sums."""

    memory_step: int = 1
    """For how many tokens an engine takes memory at a time."""


KINDS = {
    "fake": Kind(fake, 0.0, 0.0),
    "transformers": Kind(transformers, 1e-4, 0.0),
    "llamacpp": Kind(llamacpp, 1e-4, 1e-4, memory_step=256),
    "llamacpp-f16": Kind(llamacpp_as_used, 3e-2, 3e-2, memory_step=256),
    "mlx": Kind(mlx, 1e-4, 0.0),
}


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="session")
def engine(kind: Kind) -> Iterator[Engine]:
    engine = kind.build()
    yield engine
    engine.close()


@pytest.fixture
def tolerance(kind: Kind) -> float:
    return kind.tolerance


@pytest.fixture
def saved_tolerance(kind: Kind) -> float:
    return kind.saved_tolerance


@pytest.fixture
def memory_step(kind: Kind) -> int:
    return kind.memory_step
