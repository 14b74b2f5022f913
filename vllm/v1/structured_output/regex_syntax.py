"""What a regular expression may hold, checked without compiling it."""

import math
import re

MAX_REGEX_LENGTH = 10_000
MAX_REGEX_DEPTH = 100
MAX_REGEX_REPEAT = 100_000
# Of the shortest text that matches: repeats of repeats are written out.
MAX_REGEX_TEXT = 100_000

_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
# What \d, \w and \s mean in every dialect; beyond ASCII the dialects differ.
_ASCII_MEMBERS = {"d": "0-9", "w": "0-9A-Za-z_", "s": " \\t\\n\\r\\f\\v"}
_GROUP_OPENING = re.compile(r"\(\?(?:P?<[^>]*>|[a-zA-Z-]*:)")
_BRACED_ESCAPE = re.compile(r"\\[pPxuU]\{[^}]*\}")
_ASSERTION_ESCAPES = frozenset("bBAZzG")
# A member of a class, a range of them, or a difference of two classes.
_CLASS_ITEM = re.compile(r"(--|\\.|.)(?:-(?!-)(\\.|.))?", re.DOTALL)
_CLASS_ESCAPES = frozenset(["\\d", "\\D", "\\w", "\\W", "\\s", "\\S"])


def describe_regex_fault(pattern: str) -> str | None:
    """Return what no grammar can enforce or what is malformed in a pattern, or None.

    Brackets are matched and the constructs without a regular meaning are found: look
    around, word boundaries and back references. The rest is the compiler's to judge.
    """
    if len(pattern) > MAX_REGEX_LENGTH:
        return f"is longer than {MAX_REGEX_LENGTH} characters"
    depth = 0
    position = 0
    while position < len(pattern):
        char = pattern[position]
        fault = None
        if char == "\\":
            fault = _describe_escape_fault(pattern[position + 1 : position + 2])
            position += 1
        elif char == "[":
            end = _find_class_end(pattern, position)
            fault = _describe_class_fault(pattern[position + 1 : end], is_open=end < 0)
            position = end
        elif char == "(":
            depth += 1
            fault = _describe_group_fault(pattern, position, depth)
        elif char == ")":
            depth -= 1
            fault = "has an unmatched )" if depth < 0 else None
        elif char == "{":
            fault = _describe_repeat_fault(pattern, position)
        if fault is not None:
            return fault
        position += 1
    if depth:
        return "has an unclosed ("
    if _shortest_text(pattern) > MAX_REGEX_TEXT:
        return f"matches no text of up to {MAX_REGEX_TEXT} characters"
    return None


def _shortest_text(pattern: str) -> int:
    """Count the characters of the shortest text that a well-formed pattern matches."""
    # Per open group: the shortest branch so far, and the branch that is being read.
    groups: list[tuple[float, int]] = []
    shortest, length = math.inf, 0
    atom, is_repeated = 0, False
    position = 0
    while position < len(pattern):
        char = pattern[position]
        repeat = _REPEAT.match(pattern, position)
        if repeat:
            length += atom * (int(repeat[1]) - 1)
            atom *= int(repeat[1])
            is_repeated, position = True, repeat.end()
            continue
        if char in "*+?":
            # Behind a repeat, ? only makes it lazy.
            if char == "*" or (char == "?" and not is_repeated):
                length, atom = length - atom, 0
            is_repeated, position = True, position + 1
            continue
        is_repeated = False
        if char == "(":
            groups.append((shortest, length))
            shortest, length, atom = math.inf, 0, 0
            opening = _GROUP_OPENING.match(pattern, position)
            position = opening.end() if opening else position + 1
            continue
        if char == ")":
            atom = int(min(shortest, length))
            shortest, outer = groups.pop()
            length = outer + atom
        elif char == "|":
            shortest, length, atom = min(shortest, length), 0, 0
        else:
            atom = 0 if char in "^$" else 1
            length += atom
            if char == "\\":
                braced = _BRACED_ESCAPE.match(pattern, position)
                position = braced.end() - 1 if braced else position + 1
            elif char == "[":
                position = _find_class_end(pattern, position)
        position += 1
    return int(min(shortest, length))


def is_fully_anchored(pattern: str) -> bool:
    """Whether a pattern matches whole strings only, in a form that is easy to see."""
    return (
        pattern.startswith("^")
        and pattern.endswith("$")
        and not pattern.endswith("\\$")
        and not has_inner_anchor(pattern[1:-1])
        and not has_top_level_alternation(pattern)
    )


def has_inner_anchor(pattern: str) -> bool:
    """Whether ^ or $ stands outside of character classes and escapes."""
    return any(char in "^$" for char, _ in _plain_characters(pattern))


def has_top_level_alternation(pattern: str) -> bool:
    """Whether | stands outside of every group, class and escape."""
    return any(char == "|" and depth == 0 for char, depth in _plain_characters(pattern))


def escape_regex(text: str) -> str:
    """Return a pattern that matches exactly `text`."""
    return re.sub(r"([\\.^$*+?{}\[\]|()\-&~#/])", r"\\\1", text)


def narrow_classes(pattern: str) -> str:
    r"""Spell \d, \w and \s as ASCII, except where that would widen the pattern.

    The result matches a part of what the pattern matches, for readers that count other
    scripts' digits, letters and blanks in, and for those that do not.
    """
    pieces = []
    position = 0
    while position < len(pattern):
        end = position + 1
        if pattern[position] == "\\":
            end = position + 2
            members = _ASCII_MEMBERS.get(pattern[position + 1 : end])
            pieces.append(f"[{members}]" if members else pattern[position:end])
        elif pattern[position] == "[":
            end = _find_class_end(pattern, position) + 1
            inner = pattern[position:end]
            pieces.append(inner if inner.startswith("[^") else _narrow_members(inner))
        else:
            pieces.append(pattern[position])
        position = end
    return "".join(pieces)


def _narrow_members(char_class: str) -> str:
    return re.sub(
        r"\\(.)",
        lambda match: _ASCII_MEMBERS.get(match[1], match[0]),
        char_class,
        flags=re.DOTALL,
    )


def _plain_characters(pattern: str) -> list[tuple[str, int]]:
    """Characters that are not escaped and not in a class, with their group depth."""
    found = []
    depth = position = 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 2
            continue
        if char == "[":
            position = max(_find_class_end(pattern, position), position)
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        else:
            found.append((char, depth))
        position += 1
    return found


def _describe_escape_fault(escaped: str) -> str | None:
    if not escaped:
        return "ends in a lone backslash"
    if escaped in "123456789k":
        return "has a back reference, which a grammar cannot enforce"
    if escaped in _ASSERTION_ESCAPES:
        return f"has the assertion \\{escaped}, which a grammar cannot enforce"
    return None


def _describe_class_fault(members: str, *, is_open: bool) -> str | None:
    if is_open:
        return "has an unclosed ["
    for first, last in _CLASS_ITEM.findall(members.removeprefix("^")):
        # Written out as members, it would become a range of other characters.
        if last and not _CLASS_ESCAPES.isdisjoint((first, last)):
            return f"has a class as a bound of the range {first}-{last}"
    return None


def _describe_group_fault(pattern: str, start: int, depth: int) -> str | None:
    if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), start):
        return "has a lookaround, which a grammar cannot enforce"
    if pattern.startswith("(?P=", start):
        return "has a back reference, which a grammar cannot enforce"
    if depth > MAX_REGEX_DEPTH:
        return f"nests groups deeper than {MAX_REGEX_DEPTH}"
    return None


def _describe_repeat_fault(pattern: str, start: int) -> str | None:
    repeat = _REPEAT.match(pattern, start)
    bounds = [text for text in repeat.groups() if text] if repeat else []
    if any(len(text) > 6 or int(text) > MAX_REGEX_REPEAT for text in bounds):
        return f"repeats more than {MAX_REGEX_REPEAT} times"
    return None


def _find_class_end(pattern: str, start: int) -> int:
    """Position of the ] that closes the [ at `start`, or -1."""
    position = start + 1
    if pattern.startswith("^", position):
        position += 1
    # A ] in the first place is a member of the class.
    if pattern.startswith("]", position):
        position += 1
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 2
            continue
        if char == "]":
            return position
        if char == "[":
            inner = _find_posix_end(pattern, position)
            position = inner if inner > 0 else position
        position += 1
    return -1


def _find_posix_end(pattern: str, start: int) -> int:
    """Position of the last ] of [:name:] at `start`, or -1."""
    if not pattern.startswith("[:", start):
        return -1
    end = pattern.find(":]", start)
    return end + 1 if end > 0 else -1
