"""A page that stands alone: its style inside, no script, nothing fetched, light and dark, readable on a phone.

Knows HTML. Does not know what is reported. Every text that comes in is escaped here.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

from headwater.bench.style import css_variables

_LIGHT, _DARK = css_variables()
_STYLE = f"""
:root {{ color-scheme: light dark; --ground: #ffffff; --panel: #f6f8fa; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #14181d; --panel: #1d232a; {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1.25rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 0.25rem; }}
h2 {{ font-size: 1.15rem; margin: 2.25rem 0 0.5rem; }}
p {{ max-width: 46rem; margin: 0.5rem 0; }}
.lead {{ color: var(--quiet); }}
ul {{ max-width: 46rem; padding-left: 1.2rem; margin: 0.5rem 0; }}
li {{ margin: 0.3rem 0; }}
.wide {{ overflow-x: auto; }}
pre {{ padding: 0.6rem 0.9rem; background: var(--panel); border-radius: 8px; font-size: 0.9rem; max-width: 46rem; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.45rem 0.7rem; text-align: right; border-bottom: 1px solid var(--grid); }}
th {{ vertical-align: bottom; font-weight: 600; color: var(--quiet); line-height: 1.25; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
.results td {{ white-space: nowrap; }}
.results .first td {{ border-top: 2px solid var(--quiet); }}
.facts td, .facts th {{ text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
.facts th {{ min-width: 8rem; }}
figure {{ margin: 1rem 0 0; padding: 0.9rem; background: var(--panel); border-radius: 8px; }}
figure + .wide, figure + details {{ margin-top: 0.9rem; }}
figure .wide svg {{ display: block; width: 100%; min-width: 30rem; max-width: 52rem; height: auto; margin: 0 auto; }}
details {{ margin: 0.6rem 0 0; }}
summary {{ color: var(--quiet); font-size: 0.9rem; cursor: pointer; }}
figcaption {{ color: var(--quiet); font-size: 0.9rem; margin-top: 0.6rem; max-width: 46rem; }}
"""


def document(title: str, lead: str, sections: Sequence[str]) -> str:
    """A whole page from parts made by the functions below."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n' + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """A heading of the second level."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def code(text: str) -> str:
    """A command to copy, on a line of its own, which scrolls by itself on a narrow screen."""
    return f'<pre class="wide"><code>{escape(text)}</code></pre>'


def bullets(items: Sequence[str]) -> str:
    """A list, or nothing when it has no items."""
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>" if items else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], groups: Container[int] = ()) -> str:
    """A table of results, which scrolls by itself on a narrow screen; `groups` are the rows that begin one."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        f"<tr{' class=first' if index in groups else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for index, row in enumerate(rows)
    )
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="wide"><table class="results">\n{inside}</table></div>'


def folded(summary: str, content: str) -> str:
    """A part that is shown when its summary is clicked."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what belongs to them."""
    rows = "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in pairs)
    return f'<table class="facts">\n{rows}\n</table>'


def figure(svg: str, caption: str) -> str:
    """A plot with its caption. The SVG goes in as it is."""
    return f'<figure><div class="wide">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'
