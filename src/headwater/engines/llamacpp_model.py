"""A GGUF file that llama.cpp has loaded: its weights, its vocabulary, and what it says of itself.

Knows tokens, text and which models can hold a conversation at all. Does not know caches or streams.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from headwater.engines.llamacpp_library import Library
from headwater.engines.modelstore import file_fingerprint
from headwater.errors import InputFileError, ModelFileError, UnsupportedModel, UsageError

NO_ROTARY = -1
_SENTENCEPIECE = 1
_SPECIAL_TEXT = 512


class Model:
    """A loaded model. It is freed when nobody holds it any more: contexts hold theirs."""

    def __init__(self, library: Library, file: Path, *, name: str, n_gpu_layers: int = -1) -> None:
        """Raises InputFileError, UsageError or ModelFileError for a file that is no model, UnsupportedModel for a
        model that does not continue text."""
        self.library, self.file, self.name = library, file, name
        _check_magic(file)
        call = library.call
        params = call.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        with library.lock:
            library.log.clear()
            pointer = call.llama_model_load_from_file(os.fsencode(file), params)
            if not pointer:
                raise ModelFileError(f"{name} cannot be loaded by llama.cpp {library.version}: {library.log.reason()}")
        self.pointer: int = pointer
        self._free = weakref.finalize(self, call.llama_model_free, pointer)
        self._vocab: int = call.llama_model_get_vocab(pointer)
        self.vocab_size: int = call.llama_vocab_n_tokens(self._vocab)
        self.context_length: int = call.llama_model_n_ctx_train(pointer)
        self.rotary: bool = call.llama_model_rope_type(pointer) != NO_ROTARY
        self.swa_tokens: int = call.llama_model_n_swa(pointer)
        self.fingerprint = file_fingerprint(file)
        self._pieces: dict[int, bytes] = {}
        self._check_kind()

    def _check_kind(self) -> None:
        call = self.library.call
        if call.llama_model_has_encoder(self.pointer) or not call.llama_model_has_decoder(self.pointer):
            raise UnsupportedModel(f"{self.name} ({self.architecture}) has an encoder; a chat needs a causal model")
        if call.llama_model_is_diffusion(self.pointer):
            raise UnsupportedModel(
                f"{self.name} ({self.architecture}) writes by diffusion; a chat needs a causal model"
            )
        if self.vocab_size < 1 or self._number("llama_vocab_type") == 0:
            raise UnsupportedModel(f"{self.name} has no vocabulary; take a GGUF file with its tokenizer")

    @property
    def forgets(self) -> bool:
        """Whether dropping a token's K and V is all there is to forgetting it; recurrent layers keep it in a state."""
        call = self.library.call
        return not (call.llama_model_is_recurrent(self.pointer) or call.llama_model_is_hybrid(self.pointer))

    @property
    def architecture(self) -> str:
        """The name that the file gives its kind."""
        return self.fact("general.architecture") or "unknown"

    @property
    def description(self) -> str:
        """Size and precision, as llama.cpp says it: `llama 135M Q4_1`."""
        buffer = ctypes.create_string_buffer(256)
        self.library.call.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @property
    def template(self) -> str | None:
        """The chat template as text, if the file has one."""
        text = self.library.call.llama_model_chat_template(self.pointer, None)
        return text.decode(errors="replace") if text else None

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Numbers in a key and in a value of one head."""
        heads = max(1, self._model_number("llama_model_n_head"))
        plain = self._model_number("llama_model_n_embd") // heads
        return tuple(
            int(self.fact(f"{self.architecture}.attention.{part}_length") or plain) for part in ("key", "value")
        )  # pyright: ignore[reportReturnType]

    def fact(self, key: str) -> str | None:
        """A value of the file's metadata as text; None where there is none."""
        buffer = ctypes.create_string_buffer(_SPECIAL_TEXT)
        length = self.library.call.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if length >= 0 else None

    # Text.

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a text, as the file marks them."""
        ends = self.library.call.llama_vocab_is_eog
        return frozenset(token for token in range(self.vocab_size) if ends(self._vocab, token))

    @cached_property
    def tokenizer_sha256(self) -> str:
        """What tells this vocabulary from others."""
        text = self.library.call.llama_vocab_get_text
        seal = hashlib.sha256(f"{self.fact('tokenizer.ggml.model')} {self.fact('tokenizer.ggml.pre')}".encode())
        for token in range(self.vocab_size):
            seal.update(b"\0" + (text(self._vocab, token) or b""))
        return seal.hexdigest()

    def special(self, kind: str) -> str:
        """The text of the token that begins (`bos`) or ends (`eos`) a text; empty where there is none."""
        token = getattr(self.library.call, f"llama_vocab_{kind}")(self._vocab)
        text = self.library.call.llama_vocab_get_text(self._vocab, token) if token >= 0 else None
        return text.decode(errors="replace") if text else ""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids, nothing added."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"text is not valid Unicode at character {error.start}: {error.reason}") from error
        room = len(data) + 2
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self.library.call.llama_tokenize(self._vocab, data, len(data), ids, room, False, special)
            if count >= 0:
                return list(ids[:count])
            room = -count

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the ids; control tokens are left out."""
        data = b"".join(self._piece(int(token)) for token in tokens)
        if self._leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode(errors="replace")

    @cached_property
    def _leading_space(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        spaced = self.fact("tokenizer.ggml.add_space_prefix")
        return self._number("llama_vocab_type") == _SENTENCEPIECE and spaced != "false"

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self.vocab_size:
                raise UsageError(f"unknown token id {token}; ids run from 0 to {self.vocab_size - 1}")
            buffer = ctypes.create_string_buffer(_SPECIAL_TEXT)
            call = self.library.call.llama_token_to_piece
            length = call(self._vocab, token, buffer, len(buffer), 0, False)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = call(self._vocab, token, buffer, len(buffer), 0, False)
            piece = self._pieces[token] = buffer.raw[: max(0, length)]
        return piece

    def _number(self, name: str) -> int:
        return getattr(self.library.call, name)(self._vocab)

    def _model_number(self, name: str) -> int:
        return getattr(self.library.call, name)(self.pointer)


def _check_magic(file: Path) -> None:
    try:
        with file.open("rb") as source:
            magic = source.read(4)
    except FileNotFoundError as error:
        raise InputFileError(f"no such file: {file}") from error
    except OSError as error:
        raise InputFileError(f"{file} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise UsageError(f"file {file} is not a GGUF file: it begins with {magic!r}; llama.cpp reads no other")
