"""HTML from Python: everything that is not markup already is escaped, so that text of models, data and tools stays "
"text."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from grpo_async.viewer.safe_text import visible

_VOID = {"meta", "br", "hr", "col", "link"}


class Markup(str):
    """A piece of HTML that is safe as it stands. Only functions of this module make it."""

    __slots__ = ()


Child = str | Iterable[str | None] | None


def element(tag: str, *children: Child, **attributes: str | bool | None) -> Markup:
    """One element: element("a", "x < y", href="#b", class_="c") -> <a href="#b" class="c">x &lt; y</a>.

    Children are text (escaped), Markup, iterables of both, or None (left out). Attributes: a trailing "_" is dropped, "_" becomes
    "-"; None and False leave one out, True writes its name only. Handlers and inline styles are not for this report: its
    Content-Security-Policy would not run them.
    """
    written = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        assert not key.startswith("on"), key
        assert key != "style", key
        written.append(f" {key}" if value is True else f' {key}="{html.escape(visible(value), quote=True)}"')
    head = f"<{tag}{''.join(written)}>"
    if tag in _VOID:
        return Markup(head)
    return Markup(f"{head}{joined(*children)}</{tag}>")


def joined(*children: Child) -> Markup:
    """Several pieces, one after the other."""
    pieces = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            pieces.append(str(child))
        elif isinstance(child, str):
            pieces.append(html.escape(visible(child), quote=False))
        else:
            pieces.extend(str(joined(each)) for each in child)
    return Markup("".join(pieces))


def table(
    head: Iterable[Child], rows: Iterable[Iterable[Child]], *, class_: str = "", caption: str | None = None
) -> Markup:
    """A table whose first column names the rows. It scrolls inside its frame where it is too wide."""
    body = [
        element(
            "tr",
            [element("th", cell, scope="row") if place == 0 else element("td", cell) for place, cell in enumerate(row)],
        )
        for row in rows
    ]
    content = element(
        "table",
        None if caption is None else element("caption", caption),
        element("thead", element("tr", [element("th", cell, scope="col") for cell in head])),
        element("tbody", body),
        class_=class_ or None,
    )
    return element("div", content, class_="table-frame", tabindex="0")


def data_script(identifier: str, content: Any) -> Markup:
    """JSON inside a page, for scripts: `</script>` and comments in it cannot end it, since it holds no "<"."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{escaped}</script>')


def inlined(tag: str, source: str) -> Markup:
    """A script or a style sheet of ours inside a page.

    Raises:
        ValueError: it holds the end of its own element.
    """
    if f"</{tag}" in source.lower():
        raise ValueError(f"a <{tag}> that holds </{tag} would end early")
    return Markup(f"<{tag}>{source}</{tag}>")
