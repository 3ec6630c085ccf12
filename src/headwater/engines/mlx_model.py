"""A model that MLX runs: from a folder of safetensors or a GGUF file, with its text.

Knows where models are looked for, precision, tokens and text. Does not know caches or streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from headwater.engines.mlx_gguf import Parts, first_line, read_gguf
from headwater.engines.models import MODELS, gguf_file, is_gguf, is_hub_id
from headwater.engines.modelstore import file_fingerprint
from headwater.errors import InputFileError, ModelFileError, UnknownName, UnsupportedModel, UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")
WORKS_WITH = "a folder of safetensors with config.json, or a .gguf file"


class Model:
    """A loaded model."""

    def __init__(self, given: str, *, dtype: str = "auto") -> None:
        """Raises UnknownName, InputFileError, UsageError, ModelMissing or ModelFileError for what is no model,
        UnsupportedModel for one that mlx-lm does not run."""
        if dtype not in DTYPES:
            raise UnknownName("dtype", dtype, DTYPES)
        self.name = given
        place = _place(given)
        parts = _read_folder(place, given) if place.is_dir() else read_gguf(place, given)
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.dtype = "float32" if dtype == "auto" and on_cpu else dtype
        self.net: Any = parts.model
        _cast(self.net, self.dtype)
        self.tokenizer: Any = parts.tokenizer
        self.template, self.architecture, self.rotary = parts.template, parts.architecture, parts.rotary
        self.context_length, self.stop_tokens = parts.context_length, parts.stop_tokens
        self.vocab_size = int(self.net(mx.array([[0]])).shape[-1])  # only the shape: nothing is computed
        if len(self.tokenizer) > self.vocab_size:
            raise ModelFileError(
                f"{given} has weights for {self.vocab_size} tokens and a vocabulary of {len(self.tokenizer)}: its "
                "parts are of different models"
            )
        self.fingerprint = _fingerprint(place)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids, nothing added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"text is not valid Unicode at character {error.start}: {error.reason}") from error
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the ids; control tokens are left out."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def special(self, kind: str) -> str:
        """The text of the token that begins (`bos`) or ends (`eos`) a text; empty where there is none."""
        return getattr(self.tokenizer, f"{kind}_token") or ""

    @property
    def tokenizer_sha256(self) -> str:
        """What tells this vocabulary from others."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _place(given: str) -> Path:
    if given in MODELS:
        return gguf_file(given)
    path = Path(given).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"folder {given} is not a model: it has no config.json; MLX reads {WORKS_WITH}")
        return path
    if path.is_file():
        if not is_gguf(path):
            raise UsageError(f"file {given} is not a GGUF file; MLX reads {WORKS_WITH}")
        return path
    if path.suffix.lower() == ".gguf" or path.exists():
        raise InputFileError(f"no such file: {given}")
    if is_hub_id(given):
        raise UsageError(f"{given} is a hub id, and MLX reads {WORKS_WITH}; download one and give its path")
    raise UnknownName("model", given, MODELS, also=WORKS_WITH)


def _read_folder(folder: Path, name: str) -> Parts:
    from mlx_lm.utils import load_config, load_model
    from transformers import AutoTokenizer

    try:
        config = load_config(folder)
        loaded: Any = load_model(folder, lazy=True, model_config=_unnested(config))
        net, config = loaded
        mx.eval(net.parameters())
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a loader of other people's files can raise anything
        if "not supported" in str(error):
            raise UnsupportedModel(f"{name} is of a kind that mlx-lm does not run: {first_line(error)}") from error
        raise ModelFileError(f"{name} cannot be loaded by MLX: {type(error).__name__}: {first_line(error)}") from error
    text = config.get("text_config", config)
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return Parts(
        model=net,
        tokenizer=tokenizer,
        template=tokenizer.chat_template,
        context_length=int(text.get("max_position_embeddings") or 2**31),
        stop_tokens=frozenset(int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None),
        architecture=str(config["model_type"]),
        rotary=text.get("rope_parameters") or {"rope_theta": text.get("rope_theta")},
    )


def _unnested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings where every model of mlx-lm looks for them: transformers puts them under `rope_parameters`, which
    some read and others replace by their default without a word."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping) or "rope_theta" not in nested or "rope_theta" in config:
        return {}
    found: dict[str, Any] = {"rope_theta": nested["rope_theta"]}
    if nested.get("rope_type", "default") != "default":
        found["rope_scaling"] = dict(nested)
    return found


def _cast(net: Any, dtype: str) -> None:
    """Weights that are plain numbers, and the scales of those that are not, in one precision."""
    if dtype != "auto":
        kind = getattr(mx, dtype)
        floating = (mx.float32, mx.float16, mx.bfloat16)
        net.update(tree_map(lambda each: each.astype(kind) if each.dtype in floating else each, net.parameters()))
    mx.eval(net.parameters())


def _fingerprint(place: Path) -> str:
    """What tells these weights and their settings from others."""
    seal = hashlib.sha256()
    for file in _files(place):
        seal.update(f"{file.name} {file_fingerprint(file)}".encode())
    return seal.hexdigest()


def _files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from (place / "config.json", *sorted(place.glob("model*.safetensors")))
    else:
        yield place
