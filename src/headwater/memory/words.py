"""From a text to a query of SQLite's full-text search.

Knows words and quoting. Does not know tables. Nothing that a user writes is query syntax.
"""

from __future__ import annotations

import re

MOST_WORDS = 32
"""How many different words of a text are looked for; of a longer one, the first."""

STOP_WORDS = frozenset(
    """
    a about am an and any are as at be been but by can could did do does for from had has have he her him his how i if
    in is it its me my of on or our she should so some than that the their them then there these they this those to us
    was we were what when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905
)


def words_of(text: str) -> list[str]:
    """The different words of a text in order, without those that say nothing, unless there are no others."""
    found = list(dict.fromkeys(re.findall(r"\w+", text.lower())))
    return ([word for word in found if word not in STOP_WORDS] or found)[:MOST_WORDS]


def quoted(word: str) -> str:
    """A word as FTS5 takes it literally."""
    return '"' + word.replace('"', '""') + '"'


def clean(text: str) -> str:
    """A text that can be stored and tokenised: NULs and lone surrogates become replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
