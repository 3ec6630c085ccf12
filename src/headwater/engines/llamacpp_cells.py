"""Contexts of llama.cpp and the seats in them: cells for K and V, given to streams and taken back.

Knows decoding, sequences, removing and shifting, and the state of a sequence as bytes. Does not know windows, pins or
what a stream holds. A context has `n_seq_max` seats, each with cells of its own: nothing that happens in one moves
another.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int8, c_int32
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.engines.llamacpp_library import Batch
from headwater.engines.llamacpp_model import Model
from headwater.errors import CacheStateError, ModelFileError, UnknownName, UnsupportedVersion, UsageError

PIECE = 512
"""The most tokens in one call."""

SCORED_PIECE = 64
"""The same where the logits of every token are wanted."""

CELL_STEP = 256
"""Cells come in multiples of this."""

KINDS = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}
"""What a key or a value may be kept as, by llama.cpp's names. Not bf16: turning such keys ends the process."""

QUANTISED = frozenset({"q8_0", "q4_0"})
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How contexts are made, by the names of llama.cpp."""

    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int = 1
    flash_attn: str = "auto"
    n_seq_max: int = 1

    def __post_init__(self) -> None:
        for kind, name in (("type_k", self.type_k), ("type_v", self.type_v)):
            if name not in KINDS:
                raise UnknownName(kind, name, KINDS)
        if self.flash_attn not in FLASH_ATTENTION:
            raise UnknownName("flash_attn", self.flash_attn, FLASH_ATTENTION)
        for name in ("n_threads", "n_seq_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 256:
                raise UsageError(f"{name} must be an integer from 1 to 256, got {value!r}")
        if self.type_v in QUANTISED and self.flash_attn == "off":
            raise UsageError(f"values of {self.type_v} need flash attention; leave flash_attn out, or take type_v f16")


class Context:
    """One context: `seats` sequences of `cells` tokens each."""

    def __init__(self, model: Model, settings: Settings, cells: int) -> None:
        """Raises ModelFileError when llama.cpp cannot make it, UnsupportedVersion when it is not what was asked for."""
        self.model, self.settings = model, settings
        self.lock = threading.RLock()
        library, call = model.library, model.library.call
        asked = {
            "n_ctx": padded(cells) * settings.n_seq_max,
            "n_batch": min(PIECE, padded(cells)),
            "n_ubatch": min(PIECE, padded(cells)),
            "n_seq_max": settings.n_seq_max,
            "n_threads": settings.n_threads,
            "n_threads_batch": settings.n_threads,
        }
        params = call.llama_context_default_params()
        for name, value in asked.items():
            setattr(params, name, value)
        params.n_outputs_max = max(SCORED_PIECE, settings.n_seq_max)
        params.type_k, params.type_v = KINDS[settings.type_k], KINDS[settings.type_v]
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attn]
        params.swa_full, params.kv_unified = True, False
        with library.lock:
            library.log.clear()
            pointer = call.llama_init_from_model(model.pointer, params)
            if not pointer:
                raise ModelFileError(
                    f"llama.cpp has no context of {padded(cells):,} tokens for {model.name}: {library.log.reason()}"
                )
        self._free = weakref.finalize(self, call.llama_free, pointer)
        self.pointer: int = pointer
        if wrong := [name for name, value in asked.items() if getattr(call, f"llama_{name}")(pointer) != value]:
            raise UnsupportedVersion(
                f"{library.path} took another {wrong[0]} than was asked for, so its structures are not those that "
                "Headwater knows"
            )
        self.cells: int = call.llama_n_ctx_seq(pointer)
        self.memory: int = call.llama_get_memory(pointer)
        self.free = list(range(settings.n_seq_max))
        self._batch = _Batch(min(PIECE, self.cells), settings.n_seq_max)

    @property
    def idle(self) -> bool:
        """Whether nobody sits in it."""
        return len(self.free) == self.settings.n_seq_max

    def close(self) -> None:
        """Give all of its memory back."""
        with self.lock:
            self._free()

    @property
    def closed(self) -> bool:
        """Whether its memory was given back."""
        return not self._free.alive


class Seat:
    """A sequence in a context. Every call takes the context's lock, since seats share its buffers."""

    def __init__(self, context: Context, number: int) -> None:
        self.context, self.number = context, number
        self.cells = context.cells
        self._unsettled = False

    def decode(self, tokens: Sequence[int], position: int, *, every: bool = False) -> NDArray[np.float32]:
        """Decode tokens at `position` and after it; the logits of the last one, or of `every` one, `[tokens, vocab]`.

        Raises CacheStateError, with nothing decoded, when llama.cpp refuses.
        """
        context = self._open()
        with context.lock:
            context.model.library.log.clear()
            before = self.last
            code = context.model.library.call.llama_decode(
                context.pointer, context._batch.filled(tokens, position, self.number, every=every)
            )
            if code:
                self._refuse(code, len(tokens), position, before)
            self._unsettled = False
            logits = self._logits(len(tokens) if every else 1)
            last = self.last
        if last != position + len(tokens) - 1:
            raise CacheStateError(
                f"llama.cpp holds position {last} as its newest where {position + len(tokens) - 1} was decoded; "
                "open a new stream"
            )
        return logits

    def _logits(self, count: int) -> NDArray[np.float32]:
        context = self.context
        where = context.model.library.call.llama_get_logits(context.pointer)
        size = count * context.model.vocab_size
        shared = np.ctypeslib.as_array(ctypes.cast(where, POINTER(c_float)), (size,))
        return shared.reshape(count, -1).copy()

    def _refuse(self, code: int, count: int, position: int, before: int) -> None:
        context = self.context
        context.model.library.call.llama_memory_seq_rm(context.memory, self.number, before + 1, -1)
        why = "it has no room for them" if code == 1 else context.model.library.log.reason()
        raise CacheStateError(f"llama.cpp did not decode {count} tokens at position {position} (code {code}): {why}")

    def remove(self, start: int, stop: int) -> None:
        """Free the cells of positions `[start, stop)`; a negative `stop` is open. Nothing moves.

        Raises CacheStateError when this kind of model cannot drop a part.
        """
        context = self._open()
        with context.lock:
            done = context.model.library.call.llama_memory_seq_rm(context.memory, self.number, start, stop)
        if not done:
            raise CacheStateError(
                f"{context.model.name} keeps what it read in a state that cannot drop positions {start} to {stop}"
            )

    def shift(self, start: int, by: int) -> None:
        """Move every position from `start` on. The keys are turned by the next `decode`, which has to come before
        anything is saved."""
        context = self._open()
        with context.lock:
            context.model.library.call.llama_memory_seq_add(context.memory, self.number, start, -1, by)
            self._unsettled = True

    def state(self) -> NDArray[np.uint8]:
        """K, V and positions as bytes. Raises CacheStateError between a shift and the next decode."""
        context = self._open()
        call = context.model.library.call
        if self._unsettled:
            raise CacheStateError("positions were shifted and the keys are not turned yet; feed a token, then save")
        with context.lock:
            out = np.empty(call.llama_state_seq_get_size(context.pointer, self.number), dtype=np.uint8)
            size = call.llama_state_seq_get_data(context.pointer, out.ctypes.data, len(out), self.number)
        if size != len(out):
            raise CacheStateError(f"llama.cpp gave {size} bytes of a state of {len(out)}")
        return out

    def load(self, state: NDArray[np.uint8]) -> bool:
        """Become what `state` gave; False, and empty, when llama.cpp does not take it."""
        context = self._open()
        call = context.model.library.call
        whole = np.ascontiguousarray(state)
        with context.lock:
            context.model.library.log.clear()
            read = call.llama_state_seq_set_data(context.pointer, whole.ctypes.data, len(whole), self.number)
            if read != len(whole):
                call.llama_memory_seq_rm(context.memory, self.number, -1, -1)
        return read == len(whole)

    @property
    def last(self) -> int:
        """The newest position held, -1 when there is none."""
        context = self._open()
        return context.model.library.call.llama_memory_seq_pos_max(context.memory, self.number)

    @property
    def can_shift(self) -> bool:
        """Whether positions may be moved at all; elsewhere `shift` would end the process."""
        context = self._open()
        return context.model.library.call.llama_memory_can_shift(context.memory)

    def _open(self) -> Context:
        if self.context.closed:
            raise CacheStateError("the engine is closed; open a new one")
        return self.context


class Pool:
    """The contexts of one model, made when a seat is wanted and given back when the last one has left."""

    def __init__(self, model: Model, settings: Settings, *, cell_bytes: int = 0, fixed_bytes: int = 0) -> None:
        """`cell_bytes` is what a token's K and V take, `fixed_bytes` a recurrent state, where they are known."""
        self.model, self.settings = model, settings
        self.cell_bytes, self.fixed_bytes = cell_bytes, fixed_bytes
        self._contexts: list[Context] = []
        self._lock = threading.RLock()

    def take(self, cells: int) -> Seat:
        """A seat of at least so many cells, empty."""
        with self._lock:
            for context in self._contexts:
                if context.cells == padded(cells) and context.free:
                    break
            else:
                context = Context(self.model, self.settings, cells)
                self._contexts.append(context)
            return Seat(context, context.free.pop(0))

    def give(self, seat: Seat) -> None:
        """Take a seat back, and its context's memory with the last one."""
        with self._lock:
            context = seat.context
            if context.closed:
                return
            seat.remove(-1, -1)
            context.free = sorted([*context.free, seat.number])
            if context.idle:
                self._contexts.remove(context)
                context.close()

    def nbytes(self, seat: Seat) -> int:
        """Bytes that a seat takes, whatever is in it."""
        return seat.cells * self.cell_bytes + self.fixed_bytes

    def close(self) -> None:
        """Give back every context, occupied or not."""
        with self._lock:
            for context in self._contexts:
                context.close()
            self._contexts.clear()


def padded(cells: int) -> int:
    """As many cells as there will be."""
    return -(-cells // CELL_STEP) * CELL_STEP


class _Batch:
    """The arrays of a batch, made once for a context."""

    def __init__(self, size: int, seats: int) -> None:
        self._tokens, self._positions = (c_int32 * size)(), (c_int32 * size)()
        self._counts = (c_int32 * size)(*[1] * size)
        self._numbers = [(c_int32 * 1)(number) for number in range(seats)]
        self._sequences = [(POINTER(c_int32) * size)(*[each] * size) for each in self._numbers]
        self._wanted = (c_int8 * size)()

    def filled(self, tokens: Sequence[int], position: int, number: int, *, every: bool) -> Batch:
        count = len(tokens)
        self._tokens[:count] = list(tokens)
        self._positions[:count] = list(range(position, position + count))
        self._wanted[:count] = [1] * count if every else [0] * (count - 1) + [1]
        return Batch(
            n_tokens=count,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=self._sequences[number],
            logits=self._wanted,
        )
