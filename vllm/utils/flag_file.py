"""A YAML file of flags, read as the tokens of a command line."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.utils.suggestions import did_you_mean


def flags_from_file(
    path: str,
    actions: Mapping[str, argparse.Action],
    given: Collection[str],
    json_types: Collection[Callable[[str], Any]],
    null_type: Callable[[str], Any],
) -> list[str]:
    """Return the tokens that say what the file says.

    Args:
        path: YAML, a mapping of long flag names (dashes or underscores) to values.
        actions: the parser's flags by their option strings.
        given: destinations that the command line sets; the file's values are left out.
        json_types: the `type`s of flags that take a mapping.
        null_type: the `type` of flags for which null is a value; for the others it
            leaves the flag out.

    Raises:
        ValueError: the file is unreadable, or a key or the form of a value is wrong.
    """
    tokens: list[str] = []
    for key, value in _read_mapping(path).items():
        flag = f"--{key.replace('_', '-')}"
        action = actions.get(flag)
        if action is None or action.dest in ("config", "help"):
            known = [name[2:] for name in actions if name.startswith("--")]
            raise ValueError(f"unknown key {key}{did_you_mean(flag[2:], known)}")
        if action.dest in given:
            continue
        if value is not None:
            tokens += _tokens(flag, action, value, json_types)
        elif action.type is null_type:
            tokens.append(f"{flag}=null")
    return tokens


def _read_mapping(path: str) -> dict[str, Any]:
    # Only who uses a file pays for the import.
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError("must be a mapping of flag names to values")
    return values


def _tokens(
    flag: str,
    action: argparse.Action,
    value: Any,
    json_types: Collection[Callable[[str], Any]],
) -> list[str]:
    key = flag[2:]
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
        negated = f"--no-{key}"
        if value:
            return [flag]
        return [negated] if negated in action.option_strings else []
    if isinstance(value, dict):
        if action.type not in json_types:
            raise ValueError(f"{key} takes one value, not a mapping")
        return [f"{flag}={json.dumps(value)}"]
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    if action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={item}" for item in value]
    raise ValueError(f"{key} takes one value, not a list")
