"""From a text to the terms that SQLite's full-text search knows it by.

Knows words and their stems. Does not know passages. Nothing that a user writes is query syntax.
"""

from __future__ import annotations

import re
import sqlite3

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


class Stems:
    """Words as the index has them: what its tokeniser makes of each."""

    def __init__(self) -> None:
        self._table = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._table.execute("CREATE VIRTUAL TABLE words USING fts5 (word, tokenize = 'porter unicode61')")
        self._table.execute("CREATE VIRTUAL TABLE terms USING fts5vocab (words, instance)")

    def of(self, words: list[str]) -> list[str]:
        """The different terms of these words, in order."""
        self._table.execute("DELETE FROM words")
        self._table.executemany("INSERT INTO words (rowid, word) VALUES (?, ?)", list(enumerate(words)))
        rows = self._table.execute("SELECT term FROM terms ORDER BY doc, offset")
        return list(dict.fromkeys(term for (term,) in rows))

    def close(self) -> None:
        self._table.close()


def clean(text: str) -> str:
    """A text that can be stored and tokenised: NULs and lone surrogates become replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
