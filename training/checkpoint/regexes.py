"""Regular expressions applied backwards: from the name that a rule makes to the name it matches.

That works for a regex of plain text and groups, as in `layer(\\d+)\\.weight`. A part `(?:...)?`,
which a name may have or not, is written.
"""

import re

REFERENCE = re.compile(r"\\(\d)|\\g<(\w+)>")


def pieces(regex):
    """A regex as a list of plain text and of groups (number, pattern); ValueError if it has other
    elements."""
    found, number, i = [], 0, 0
    while i < len(regex):
        character, i = regex[i], i + 1
        if character == "(":
            end = closing(regex, i)
            inner, i = regex[i:end], end + 1
            if inner.startswith("?:") and regex[i : i + 1] == "?":
                optional = pieces(inner[2:])
                if not all(isinstance(piece, str) for piece in optional):
                    raise ValueError(f"({inner})? has a group inside")
                found, i = [*found, *optional], i + 1
                continue
            number += 1
            pattern = re.sub(r"^\?P<\w+>", "", inner)
            if pattern.startswith("?"):
                raise ValueError(f"({inner}) is neither a group nor optional")
            found.append((number, pattern))
            number += re.compile(pattern).groups
        elif character == "\\" and not regex[i].isalnum():
            found, i = [*found, regex[i]], i + 1
        elif character in "\\.^$*+?{}[]|)":
            text = regex[i - 1 : i + 1] if character == "\\" else character
            raise ValueError(f"{text!r} stands outside of a group; put \\ before a plain character")
        else:
            found.append(character)
    return found


def closing(regex, i):
    """The place of the bracket that closes a group, whose inside begins at i."""
    depth = 1
    while depth:
        if regex[i] == "\\":
            i += 1
        else:
            depth += {"(": 1, ")": -1}.get(regex[i], 0)
        i += 1
    return i - 1


def leaf_pattern(target, regex, items):
    """The compiled regex that a name made from the target matches, with groups called g1 and so on;
    ValueError if such a name does not say what the groups of `regex`, in `items`, matched."""
    patterns = dict(item for item in items if isinstance(item, tuple))
    result, end, seen = "", 0, set()
    for reference in REFERENCE.finditer(target):
        number = number_of(reference, regex)
        result += re.escape(target[end : reference.start()])
        end = reference.end()
        result += f"(?P=g{number})" if number in seen else f"(?P<g{number}>{patterns[number]})"
        seen.add(number)
    if lacking := patterns.keys() - seen:
        raise ValueError(f"{target!r} does not contain group {min(lacking)} of the regex")
    return re.compile(result + re.escape(target[end:]))


def number_of(reference, regex):
    """The number of the group that a reference such as \\1 or \\g<name> stands for."""
    key = reference[1] or reference[2]
    return int(key) if key.isdecimal() else re.compile(regex).groupindex[key]


def name_of_array(items, match):
    """The name that a regex matches, from its pieces and a match of `leaf_pattern`."""
    return "".join(item if isinstance(item, str) else match[f"g{item[0]}"] for item in items)


def name_of_leaf(target, regex, match):
    """The name that a target makes, from a match of another target's `leaf_pattern`."""
    return REFERENCE.sub(lambda found: match[f"g{number_of(found, regex)}"], target)
