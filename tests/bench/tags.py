"""A page as its tags."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Tags(HTMLParser):
    """Every tag with its attributes; complains about tags that are not closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.ids, self.words = (
            list[tuple[str, dict[str, str | None]]](),
            list[str](),
            list[str](),
            "",
        )
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def check_stands_alone(page: str) -> None:
    """No script, no handler, nothing fetched, no other host, on the page and inside its plots; every reference met."""
    read = Tags(page)
    assert not read.open
    assert not {"script", "link", "iframe", "object", "embed", "img", "image", "base"} & {tag for tag, _ in read.tags}
    for _, attributes in read.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"href", "src", "xlink:href"}:
                assert (value or "").startswith("#")
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert len(read.ids) == len(set(read.ids))
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]+)", page)) <= set(read.ids)
