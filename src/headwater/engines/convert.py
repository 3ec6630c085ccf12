"""From a GGUF file to a dense float32 folder that transformers loads in a second.

Knows transformers' GGUF reader and how to keep it quiet. Does not know where files come from or go to. A GGUF loaded as
it is stays in blocks that are unpacked at every forward, which is slow on a CPU; so it is unpacked once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.engines.modelstore import Progress, Step, room_for
from headwater.errors import HeadwaterError, MissingExtra, ModelFileError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RUNTIME = ("torch", "transformers", "accelerate", "gguf", "safetensors")
_OVERHEAD_BYTES = 16_000_000  # tokenizer and configuration, generously


def require_runtime() -> None:
    """Raise MissingExtra unless everything that loading and converting needs is installed; imports nothing."""
    for name in _RUNTIME:
        if find_spec(name) is None:
            raise MissingExtra(name, "transformers")


@contextlib.contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keep the libraries' warnings, and their progress bars unless `bars`, off the terminal; then put all back."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not bars:  # one of the bars has no switch; all of them write to the stderr of the moment
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `gguf` to `folder`: float32 safetensors, configuration, tokenizer and chat template.

    Raises ModelFileError when the file is broken or of an architecture that transformers cannot read from GGUF.
    """
    try:
        with quiet():
            _convert(gguf, folder, progress)
    except (HeadwaterError, OSError) as error:
        if isinstance(error, OSError) and error.errno is None:  # how transformers says that a file does not fit
            raise _unreadable(gguf, error) from error
        raise
    except Exception as error:  # a reader of other people's files can raise anything
        raise _unreadable(gguf, error) from error


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoTokenizer, GgufConfig

    progress(Step(name="reading the tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    progress(Step(name="unpacking the weights to float32"))
    model = load_whole(
        gguf.name,
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.float32,
    )
    progress(Step(name="writing the model"))
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) + _OVERHEAD_BYTES
    with room_for(folder, needed):
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # it hides the system's error in its text
            if f"os error {errno.ENOSPC}" in str(error):
                raise OSError(errno.ENOSPC, "no space left on device") from error
            raise
        tokenizer.save_pretrained(folder)


def load_whole(name: str, location: str | Path, **options: Any) -> PreTrainedModel:
    """The causal model at `location`. Raises ModelFileError when weights are missing: transformers fills them with
    random numbers and only warns."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(location, output_loading_info=True, **options)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelFileError(f"{name} lacks {len(missing)} of the model's weights ({some}): not a whole causal model")
    return model


def _unreadable(gguf: Path, error: Exception) -> ModelFileError:
    first = (str(error).strip() or "no reason").splitlines()[0]
    return ModelFileError(
        f"cannot convert {gguf.name}: {type(error).__name__}: {first};\n"
        "it is broken, or of an architecture that transformers cannot read from GGUF"
    )
