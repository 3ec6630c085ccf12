"""Tiny random models of many families, built from configs: seconds to make, no files, every layer different.

`FAMILIES` names each with what it is there for; `build(name)` makes a model with fixed weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model to build; `note` says what its positions are like; `refused` holds words of the refusal, if it is one."""

    config: str
    note: str
    options: dict[str, Any]
    refused: str | None = None
    attention: tuple[str, ...] = ("sdpa", "eager")
    """Implementations the family has; the first one is the default."""


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LONG = {"original_max_position_embeddings": 256, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

FAMILIES: dict[str, Family] = {
    "llama": Family(config="LlamaConfig", note="plain rotary", options={}),
    "mistral": Family(config="MistralConfig", note="plain rotary, no window", options={"sliding_window": None}),
    "mistral-sliding": Family(
        config="MistralConfig",
        note="every layer slides by itself",
        options={"sliding_window": 64},
        refused="no full-attention layers",
    ),
    "qwen2": Family(config="Qwen2Config", note="rotary, biased projections", options={}),
    "qwen3": Family(config="Qwen3Config", note="rotary after a norm of the keys", options={}),
    "phi3": Family(config="Phi3Config", note="partial rotary", options={"partial_rotary_factor": 0.5}),
    "gemma2": Family(
        config="Gemma2Config",
        note="every second layer slides",
        options={"sliding_window": 16, "layer_types": HYBRID},
        attention=("eager",),
    ),
    "gemma3": Family(
        config="Gemma3TextConfig",
        note="two rotary bases, sliding layers",
        options={"sliding_window": 16, "layer_types": HYBRID},
    ),
    "glm4": Family(config="Glm4Config", note="partial, interleaved", options={"partial_rotary_factor": 0.5}),
    "cohere2": Family(
        config="Cohere2Config",
        note="interleaved; full layers without rotary; sliding layers",
        options={"sliding_window": 16, "layer_types": HYBRID},
    ),
    "smollm3": Family(config="SmolLM3Config", note="every fourth layer without rotary", options={}),
    "gpt_neox": Family(config="GPTNeoXConfig", note="partial rotary, no position keywords", options={}),
    "gpt_oss": Family(
        config="GptOssConfig",
        note="learned sinks, sliding layers",
        options={
            "sliding_window": 16,
            "layer_types": HYBRID,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            **_rope("default"),
        },
        attention=("eager",),
    ),
    "linear": Family(config="LlamaConfig", note="rope type linear", options=_rope("linear", factor=4.0)),
    "dynamic": Family(config="LlamaConfig", note="rope type dynamic", options=_rope("dynamic", factor=4.0)),
    "yarn": Family(
        config="LlamaConfig",
        note="rope type yarn",
        options=_rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "longrope": Family(config="LlamaConfig", note="rope type longrope", options=_rope("longrope", factor=2.0, **LONG)),
    "llama3": Family(
        config="LlamaConfig",
        note="rope type llama3",
        options=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "gpt2": Family(
        config="GPT2Config", note="learned positions", options={"n_positions": 512}, refused="no rotary embedding"
    ),
    "bloom": Family(
        config="BloomConfig", note="ALiBi", options={}, refused="no rotary embedding", attention=("eager",)
    ),
}


def build(
    name: str, *, seed: int = 0, attention: str | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A model of the family with fixed random weights, large enough that attention is far from uniform."""
    family = FAMILIES[name]
    config_class: Callable[..., Any] = getattr(transformers, family.config)
    config = config_class(**{**COMMON, **family.options, **changes})
    attention = attention or family.attention[0]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model.to(dtype).eval()


def tokens(count: int, *, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids `[rows, count]`, control tokens left out."""
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, cache: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(prompt, cache=cache, max_new_tokens=count, **options)


def by_hand(model: Any, cache: Any, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy decoding with forward passes of our own, the prompt in one call."""
    ids = prompt
    with torch.inference_mode():
        fed = 0
        for _ in range(count):
            logits = model(input_ids=ids[:, fed:], cache=cache).logits[:, -1]
            fed = ids.shape[1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids
