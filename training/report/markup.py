"""HTML elements as strings. All text is escaped, except markup that this module made."""

import html
import json

DOT = " \N{MIDDLE DOT} "  # between facts on one line


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(child):
    """A child of an element as markup: lists are joined, None is empty, other text is escaped."""
    if isinstance(child, list | tuple):
        return "".join(map(escaped, child))
    text = "" if child is None else child
    return text if isinstance(text, Html) else html.escape(str(text))


def tag(name, /, *children, **attributes):
    """An element; "p.note" has the class note, `data_x` is data-x; None or False leaves one out."""
    name, *classes = name.split(".")
    written = ""
    for key, value in ({"class": " ".join(classes) or None} | attributes).items():
        if value is not None and value is not False:
            written += f' {key.replace("_", "-")}="{html.escape(str(value))}"'
    return Html(f"<{name}{written}>{escaped(children)}</{name}>")


def empty(name, /, **attributes):
    """An element that cannot have children."""
    return Html(tag(name, **attributes).rpartition("</")[0])


def data(value, **attributes):
    """A value for the page's script."""
    # "<" is escaped, since "</script>" in the value would end the element.
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def note(text):
    """A remark in small grey text, or None without a text."""
    return tag("p.note", text) if text else None


def headline(title, subtitle):
    """The top of the page."""
    eyebrow = tag("p.eyebrow", f"Rawtree{DOT}run report")
    return tag("header", eyebrow, tag("h1", title), tag("p.muted", subtitle))


def section(title, *children):
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), *children)


def folded(title, *children):
    """Content that a click on its title shows."""
    return tag("details", tag("summary", title), *children)


def definitions(name, pairs):
    """A list of terms and their values, with a class of that name."""
    rows = [tag("div", tag("dt", term), tag("dd", value)) for term, value in pairs]
    return tag(f"dl.{name}", rows)


def table(head, rows, kind="", **attributes):
    """A table of a class; a cell that is a td or th element is used unchanged."""

    def line(cells, name):
        ready = [isinstance(c, Html) and c.startswith(("<td", "<th")) for c in cells]
        return tag("tr", [c if r else tag(name, c) for c, r in zip(cells, ready, strict=True)])

    body = tag("tbody", [line(row, "td") for row in rows])
    thead = tag("thead", line(head, "th"))
    return tag("div.wide", tag(f"table.{kind}", thead, body, **attributes))
