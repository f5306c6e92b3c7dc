"""HTML elements as strings. All text is escaped, except markup that this module made."""

import html
import json

DOT = " \N{MIDDLE DOT} "  # between facts on one line


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(child):
    """A child of an element as markup: lists are joined, None is empty, other text is escaped."""
    if child is None:
        return ""
    if isinstance(child, list | tuple):
        return "".join(map(escaped, child))
    return child if isinstance(child, Html) else html.escape(str(child))


def tag(name, /, *children, **attributes):
    """An element; `class_` becomes class, `data_x` data-x, and None or False leaves one out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>{escaped(children)}</{name}>")


def empty(name, /, **attributes):
    """An element that cannot have children."""
    return Html(tag(name, **attributes).removesuffix(f"</{name}>"))


def data(value):
    """A value for the page's script."""
    # "<" is escaped, since "</script>" in the value would end the element.
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')


def note(text):
    """A remark in small grey text."""
    return tag("p", text, class_="note")


def problem(text):
    """A sentence about something that cannot be shown."""
    return tag("p", text, class_="problem")


def headline(title, subtitle):
    """The top of the page."""
    return tag(
        "header",
        tag("p", f"Rawtree{DOT}run report", class_="eyebrow"),
        tag("h1", title),
        tag("p", subtitle, class_="muted"),
    )


def section(title, *children):
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), *children)


def folded(title, *children):
    """Content that a click on its title shows."""
    return tag("details", tag("summary", title), *children)


def definitions(pairs, class_):
    """A list of names and their values."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs]
    return tag("dl", rows, class_=class_)


def table(head, rows, **attributes):
    """A table; a cell that is a td or th element is used unchanged."""

    def line(cells, kind):
        ready = [isinstance(c, Html) and c.startswith(("<td", "<th")) for c in cells]
        return tag("tr", [c if r else tag(kind, c) for c, r in zip(cells, ready, strict=True)])

    body = tag("tbody", [line(row, "td") for row in rows])
    return tag(
        "div", tag("table", tag("thead", line(head, "th")), body, **attributes), class_="wide"
    )
