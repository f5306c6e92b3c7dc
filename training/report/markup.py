"""HTML in which everything is escaped unless it was made here."""

import html
import json


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(child):
    """A child of an element as markup: lists are joined, None is nothing, any other text is escaped."""
    if child is None:
        return ""
    if isinstance(child, list | tuple):
        return "".join(map(escaped, child))
    return child if isinstance(child, Html) else html.escape(str(child))


def tag(name, /, *children, **attributes):
    """An element. `class_` is written class, `data_x` data-x; an attribute that is None or False is left out."""
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{told}>{escaped(children)}</{name}>")


def empty(name, /, **attributes):
    """An element that cannot have children."""
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def data(value):
    """A value for the page's script."""
    text = json.dumps(value, separators=(",", ":")).replace(
        "<", "\\u003c"
    )  # or a '</script>' in it would end the element
    return Html(f'<script type="application/json">{text}</script>')


def section(title, *children):
    """A part of the page under its headline."""
    return tag("section", tag("h2", title), *children)


def folded(title, *children):
    """What is shown on a click."""
    return tag("details", tag("summary", title), *children)


def table(head, rows, **attributes):
    """A table; cells that are elements are taken as they are."""

    def line(cells, kind):
        return tag(
            "tr",
            [
                c if isinstance(c, Html) and c.startswith(("<td", "<th")) else tag(kind, c)
                for c in cells
            ],
        )

    body = tag(
        "table",
        tag("thead", line(head, "th")),
        tag("tbody", [line(row, "td") for row in rows]),
        **attributes,
    )
    return tag("div", body, class_="wide")
