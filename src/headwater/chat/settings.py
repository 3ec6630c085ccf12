"""What a chat is opened with: what the caller said, else what the session has, else the defaults.

Knows which of these goes before which, and how they are written down. Does not know what any of them does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from headwater.chat.reader import checked_stops
from headwater.chat.sampling import Sampling
from headwater.errors import UsageError
from headwater.policies import POLICIES, Policy
from headwater.policies import policy as make_policy

MODEL, ENGINE, POLICY, BUDGET, MAX_TOKENS = "smollm2", "transformers", "streaming-llm", 1024, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a chat is opened with, beside its system prompt."""

    model: str
    engine: str
    template: str | None
    policy: Policy[Any]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]

    @classmethod
    def of(
        cls,
        stored: Mapping[str, Any],
        *,
        model: str | None = None,
        engine: str | None = None,
        template: str | None = None,
        policy: str | Policy[Any] | None = None,
        budget: int | None = None,
        sinks: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | str | None = None,
    ) -> Settings:
        """`stored` is what `as_json` gave; a mapping as `sampling` changes what it names.

        Raises UsageError for values that do not fit, and for another model, engine or template than those of the
        session, whose tokens they would not be.
        """
        for name, given in (("model", model), ("engine", engine), ("template", template)):
            if stored and given is not None and given != stored[name]:
                shown = "another one" if name == "template" else f"{given!r}"
                was = "none" if stored[name] is None else "its own" if name == "template" else repr(stored[name])
                raise UsageError(
                    f"the session was begun with {was} as its {name}, and {shown} was given; leave {name} out, or take "
                    "another session (headwater sessions export and import carry a conversation over)"
                )
        if not isinstance(sampling, Sampling):
            sampling = Sampling(**{**(stored["sampling"] if stored else {}), **(sampling or {})})
        stops = checked_stops(stop if stop is not None else stored["stop"] if stored else ())
        return cls(
            model=model or (stored["model"] if stored else MODEL),
            engine=engine or (stored["engine"] if stored else ENGINE),
            template=stored["template"] if stored else template,
            policy=_policy(stored, policy, budget, sinks),
            sampling=sampling,
            max_tokens=max_tokens if max_tokens is not None else stored["max_tokens"] if stored else MAX_TOKENS,
            stop=stops,
        )

    def named(self, model: str) -> Settings:
        """The same with the name of an engine that was open already."""
        return replace(self, model=model)

    def on(self, engine: str) -> Settings:
        """The same on an engine that was chosen because nobody named one."""
        return replace(self, engine=engine)

    def as_json(self) -> dict[str, Any]:
        """As it is written down. A policy of one's own is written by its name, and has to be given again."""
        policy = self.policy
        options = (
            {field.name: getattr(policy, field.name) for field in fields(policy)} if policy.name in POLICIES else {}
        )
        return {
            "model": self.model,
            "engine": self.engine,
            "template": self.template,
            "policy": policy.name,
            "policy_options": options,
            "sampling": asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop),
        }


def _policy(
    stored: Mapping[str, Any], choice: str | Policy[Any] | None, budget: int | None, sinks: int | None
) -> Policy[Any]:
    given = {name: value for name, value in (("budget", budget), ("sinks", sinks)) if value is not None}
    if choice is None and stored:
        return make_policy(stored["policy"], **{**stored["policy_options"], **given})
    if choice is None or isinstance(choice, str):
        given.setdefault("budget", stored["policy_options"].get("budget", BUDGET) if stored else BUDGET)
    return make_policy(POLICY if choice is None else choice, **given)
