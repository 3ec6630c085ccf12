"""One small engine of every kind, for the contract suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.engines.base import Engine
from headwater.engines.fake import FakeEngine

CONTEXT_LENGTH = 128
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


ENGINES = {"fake": fake, "transformers": transformers}


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = ENGINES[request.param]()
    yield engine
    engine.close()


@pytest.fixture
def tolerance(engine: Engine) -> float:
    """How far logits may differ between two ways of feeding the same tokens."""
    return 0.0 if isinstance(engine, FakeEngine) else 1e-4
