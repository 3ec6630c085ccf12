"""A chat template's own language, for runtimes that bring the template's text and nobody to run it.

Knows Jinja in a sandbox, and what the templates of published models expect of it. Does not know models or dialogue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from headwater.errors import MissingExtra, UnsupportedModel


def render_template(
    text: str, messages: Sequence[Mapping[str, str]], *, open_answer: bool, name: str, bos: str, eos: str
) -> str:
    """The template over the messages. `name` is the model's; `bos` and `eos` are what templates write around a text.

    Raises UnsupportedModel when it is no template, or refuses the messages; MissingExtra without Jinja.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "llamacpp") from None
    try:
        return (
            _environment()
            .from_string(text)
            .render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=open_answer,
                bos_token=bos,
                eos_token=eos,
            )
        )
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedModel(
            f"the chat template of {name} is not one that Jinja reads: {error.message} in line {error.lineno}"
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise UnsupportedModel(f"the chat template of {name} refuses the roles {roles}: {error}") from error


def _environment() -> Any:
    """As published templates expect it: blocks take their line with them, and a template may refuse a conversation."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
