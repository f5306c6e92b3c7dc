"""HTML elements as strings. All text is escaped, except markup that this module made."""

import html
import json
import math
from collections.abc import Iterable

DOT = " \N{MIDDLE DOT} "  # between facts on one line


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(child: object) -> str:
    """A child of an element as markup: lists are joined, None is empty, other text is escaped."""
    if isinstance(child, list | tuple):
        return "".join(map(escaped, child))
    text = "" if child is None else child
    return text if isinstance(text, Html) else html.escape(str(text))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; "p.note" has the class note, `data_x` is data-x; None or False leaves one out."""
    name, *classes = name.split(".")
    written = ""
    for key, value in ({"class": " ".join(classes) or None} | attributes).items():
        if value is not None and value is not False:
            written += f' {key.replace("_", "-")}="{html.escape(str(value))}"'
    return Html(f"<{name}{written}>{escaped(children)}</{name}>")


def empty(name: str, /, **attributes: object) -> Html:
    """An element that cannot have children."""
    return Html(tag(name, **attributes).rpartition("</")[0])


def data(value: object, **attributes: object) -> Html:
    """A value for the page's script."""
    # "<" is escaped, since "</script>" in the value would end the element.
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def note(text: str | None) -> Html | None:
    """A remark in small grey text, or None without a text."""
    return tag("p.note", text) if text else None


def headline(title: object, subtitle: str) -> Html:
    """The top of the page."""
    eyebrow = tag("p.eyebrow", f"Rawtree{DOT}run report")
    return tag("header", eyebrow, tag("h1", title), tag("p.muted", subtitle))


def section(title: str, *children: object) -> Html:
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), *children)


def folded(title: str, *children: object) -> Html:
    """Content that a click on its title shows."""
    return tag("details", tag("summary", title), *children)


def definitions(name: str, pairs: Iterable[tuple[str, object]]) -> Html:
    """A list of terms and their values, with a class of that name."""
    rows = [tag("div", tag("dt", term), tag("dd", value)) for term, value in pairs]
    return tag(f"dl.{name}", rows)


def table(
    head: Iterable[object], rows: Iterable[Iterable[object]], kind: str = "", **attributes: object
) -> Html:
    """A table of a class; a cell that is a td or th element is used unchanged."""

    def line(cells: Iterable[object], name: str) -> Html:
        ready = [isinstance(c, Html) and c.startswith(("<td", "<th")) for c in cells]
        return tag("tr", [c if r else tag(name, c) for c, r in zip(cells, ready, strict=True)])

    body = tag("tbody", [line(row, "td") for row in rows])
    thead = tag("thead", line(head, "th"))
    return tag("div.wide", tag(f"table.{kind}", thead, body, **attributes))


# Numbers as readable text.


def plain(value: float | int | None) -> str:
    """A number as short as is readable: 0.9612, 24,900, 3e-05."""
    if value is None or math.isnan(value):
        return "\N{EM DASH}"
    size, value = abs(value), value + 0.0  # which is 0, not -0
    if value != 0 and not 1e-4 <= size < 1e7:
        return f"{value:.3g}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    digits = 4 if size < 10 else 2 if size < 100 else 1
    return f"{value:.3g}" if size < 0.1 else f"{value:.{digits}f}"


def duration(seconds: float | int) -> str:
    """A time in its two largest units: 22.9 s, 3 min 20 s, 2 h 14 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24:,} d {hours % 24} h"
