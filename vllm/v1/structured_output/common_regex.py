"""Which regular expressions mean the same to Rust's regex crate and to xgrammar.

A list of what is known to be read alike, not of what is not: xgrammar takes an escape
that it does not know for its letter, and other things beside without an error.
"""

import re

# Not \\x41, of which xgrammar reads more than two digits.
_CODE_POINT = r"\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
# Not \< and \>, which are assertions in Rust.
_PUNCTUATION = r"\\[!-/:;=?@\[-`{-~]"
_CONTROL = r"\\[tnrfv]"
_BOUND = rf"(?:[^\\\[\]^\-]|{_CODE_POINT})"
# Not \^, which would negate the class in xgrammar.
_CLASS_ESCAPE = rf"(?:{_CONTROL}|(?!\\\^){_PUNCTUATION}%s)(?!-[^\]])"
_CLASS = rf"\[\^?-?(?:(?!&&|~~)(?:{_BOUND}(?:-{_BOUND})?|{_CLASS_ESCAPE}))+-?\]"
_REPEAT = r"(?:[*+?]|\{\d+(?:,\d*)?\})\??"
_GROUP = r"\((?:\?:|\?<[A-Za-z][A-Za-z0-9_]*>)?"
_SYNTAX = rf"\^?(?:{_GROUP}|\||(?:\)|%s)(?:{_REPEAT})?)*\$?"

_PLAIN = r"[^\\\[\](){}*+?|^$]"
_COMMON = re.compile(
    _SYNTAX % "|".join([_PLAIN, _CLASS % "", _CODE_POINT, _CONTROL, _PUNCTUATION])
)
# Within the quotes of a JSON string, xgrammar escapes what has to be escaped in classes
# only. There both libraries take \d and \w for ASCII.
_IN_JSON = re.compile(
    _SYNTAX
    % "|".join(
        [
            r"""(?!["\x00-\x1f])""" + _PLAIN,
            _CLASS % r"|\\[dw]",
            r"(?!\\u00(?:[01]|22|5[cC]))" + _CODE_POINT,
            r'(?!\\["\\])' + _PUNCTUATION,
            r"\\[dw]",
        ]
    )
)
_CLASS_OR_ATOM = re.compile(rf"{_CLASS % ''}|\\.|.", re.DOTALL)


def is_common_regex(pattern: str) -> bool:
    """Whether a constraint's pattern is made of forms that both read alike.

    Anchors around the whole are among them; whether they are is not checked here.
    """
    return _COMMON.fullmatch(pattern) is not None


def is_common_json_pattern(pattern: str) -> bool:
    """The same of a pattern in a JSON schema."""
    return _IN_JSON.fullmatch(pattern) is not None


def spell_dots(pattern: str) -> str:
    """Spell . as Rust means it, without the line break, in a common pattern."""
    return _CLASS_OR_ATOM.sub(
        lambda match: r"[^\n]" if match[0] == "." else match[0], pattern
    )
