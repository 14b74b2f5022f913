"""A command-line parser with dotted JSON flags, a file of flags and help by topic."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.utils.flag_file import flags_from_file
from vllm.utils.quantities import parse_human_int
from vllm.utils.suggestions import did_you_mean

_GROUP_HINT = """\
More help:
  {prog} --help=all           every flag
  {prog} --help=<group>       the flags of one group
  {prog} --help=<flag>        one flag, such as --help=max-model-len
  {prog} --help=<word>        the flags that mention a word
  {prog} --help=listgroup     what the groups are for"""


def human_int(text: str) -> int:
    """Read an integer flag such as 4096, 32K (32,768) or 25.6k (25,600)."""
    try:
        return parse_human_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_mapping(text: str) -> dict[str, Any]:
    """Read a JSON object; its keys can also be set as dotted flags."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return value


def json_mapping_or_word(text: str) -> dict[str, Any] | str | None:
    """Read a JSON object, `auto` for the default, or `null` for none."""
    if text == "null":
        return None
    return text if text == "auto" else json_mapping(text)


# What a dotted flag can set a key of.
_JSON_TYPES = (json_mapping, json_mapping_or_word)


class _HelpAction(argparse.Action):
    """`--help` shows the groups, `--help=TOPIC` what belongs to a topic."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlexibleArgumentParser)
        parser.print_topic(str(values) if values else "")
        parser.exit()


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser for many flags.

    It reads `--max_model_len` as `--max-model-len`; it merges dotted flags
    (`--structured-outputs-config.backend xgrammar`) into the JSON flag before the dot;
    it reads `--config FILE` (YAML), whose values the command line overrides; and it
    names the closest flag when one is unknown. Every error is one line and exit code 2.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, add_help=False, allow_abbrev=False)
        self.add_argument(
            "-h",
            "--help",
            nargs="?",
            action=_HelpAction,
            metavar="TOPIC",
            help="show help: of everything (all), a group, a flag or a word",
        )

    def add_config_argument(self) -> None:
        """Add `--config FILE`."""
        self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file of flags by their long names; flags given here override it",
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, with the configuration file and the dotted flags merged in."""
        tokens = [
            _normalise(token) for token in (sys.argv[1:] if args is None else args)
        ]
        tokens, dotted = self._take_dotted(tokens)
        # Behind the others: a flag of many values must not take a positional argument.
        tokens += self._from_config_file(tokens)
        tokens += self._dotted_as_flags(tokens, dotted)
        parsed, unknown = super().parse_known_args(tokens, namespace)
        if unknown:
            self.error(self._unknown_message(unknown))
        return parsed, unknown

    def _flags(self) -> dict[str, argparse.Action]:
        return self._option_string_actions

    def _unknown_message(self, unknown: list[str]) -> str:
        first = unknown[0]
        if not first.startswith("-"):
            return f"unexpected argument {first!r}"
        flag = first.partition("=")[0]
        return f"unknown flag {flag}{did_you_mean(flag, self._flags())}"

    def _take_dotted(
        self, tokens: list[str]
    ) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Split tokens into the ordinary ones and {JSON flag: nested values}."""
        rest: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        position = 0
        while position < len(tokens):
            token = tokens[position]
            position += 1
            name, has_value, text = token.partition("=")
            flag, dot, path = name.partition(".")
            if not (dot and flag.startswith("--")):
                rest.append(token)
                continue
            action = self._flags().get(flag)
            if action is None or action.type not in _JSON_TYPES:
                self.error(
                    f"unknown flag {name}{did_you_mean(flag, self._json_flags())}"
                )
            value: Any = True
            if has_value:
                value = _json_or_text(text)
            elif position < len(tokens) and not tokens[position].startswith("--"):
                value = _json_or_text(tokens[position])
                position += 1
            _set_path(dotted.setdefault(flag, {}), path.split("."), value)
        return rest, dotted

    def _json_flags(self) -> list[str]:
        return [
            flag for flag, action in self._flags().items() if action.type in _JSON_TYPES
        ]

    def _dotted_as_flags(
        self, tokens: list[str], dotted: dict[str, dict[str, Any]]
    ) -> list[str]:
        """Merge dotted values over the last plain value of the same flag."""
        flags: list[str] = []
        for flag, values in dotted.items():
            base: dict[str, Any] = {}
            for position, token in enumerate(tokens):
                name, has_value, text = token.partition("=")
                if name != flag:
                    continue
                if not has_value:
                    text = tokens[position + 1] if position + 1 < len(tokens) else ""
                read = self._flags()[flag].type
                assert callable(read), "of a JSON flag"
                try:
                    value = read(text)
                except argparse.ArgumentTypeError as error:
                    self.error(f"argument {flag}: {error}")
                # A word that stands for a whole mapping has no keys to keep.
                base = value if isinstance(value, dict) else {}
            flags.append(f"{flag}={json.dumps(_merged(base, values))}")
        return flags

    def _from_config_file(self, tokens: list[str]) -> list[str]:
        """Return the file's values as flags, without those given in `tokens`."""
        flags = self._flags()
        path = _last_value(tokens, "--config") if "--config" in flags else None
        if path is None:
            return []
        names = {token.partition("=")[0] for token in tokens}
        given = {flags[name].dest for name in names if name in flags}
        try:
            return flags_from_file(
                path, flags, given, _JSON_TYPES, json_mapping_or_word
            )
        except ValueError as error:
            self.error(f"--config {path}: {error}")

    def print_topic(self, topic: str) -> None:
        """Print the help of a group, a flag, a word, `all`, `listgroup` or nothing."""
        if topic == "all":
            text = self.format_help()
        elif not topic:
            text = self._format_overview()
        elif topic == "listgroup":
            text = "".join(
                f"{group.title}: {group.description or ''}\n"
                for group in self._titled_groups()
            )
        else:
            text = self._format_topic(topic)
        self._print_message(text, sys.stdout)

    def _titled_groups(self) -> list[argparse._ArgumentGroup]:
        return [group for group in self._action_groups if group._group_actions]

    def _format_overview(self) -> str:
        lines = [f"usage: {self.prog} {self._positional_usage()}[flags]", ""]
        if self.description:
            lines += [self.description, ""]
        for group in self._titled_groups():
            flags = [_longest(action) for action in group._group_actions]
            lines.append(f"{group.title}:")
            lines += _wrapped(flags)
        return "\n".join([*lines, "", _GROUP_HINT.format(prog=self.prog)]) + "\n"

    def _positional_usage(self) -> str:
        names = [
            f"[{action.metavar or action.dest}] "
            if action.nargs in ("?", "*")
            else f"{action.metavar or action.dest} "
            for action in self._get_positional_actions()
        ]
        return "".join(names)

    def _format_topic(self, topic: str) -> str:
        formatter = self._get_formatter()
        for group in self._titled_groups():
            if (group.title or "").lower() == topic.lower():
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
                return formatter.format_help()
        flag = _normalise("--" + topic.lstrip("-"))
        actions = [a for a in self._actions if flag in a.option_strings]
        if not actions:
            word = topic.lower().replace("_", "-")
            actions = [
                action
                for action in self._actions
                if word in _longest(action) or word in (action.help or "").lower()
            ]
        if not actions:
            titles = [str(group.title) for group in self._titled_groups()]
            known = [*titles, *(name.lstrip("-") for name in self._flags())]
            self.error(f"no group, flag or word {topic!r}{did_you_mean(topic, known)}")
        formatter.add_arguments(actions)
        return formatter.format_help()


def _normalise(token: str) -> str:
    """Write the underscores of a flag's name as dashes, not those behind a dot."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    flag, dot, path = name.partition(".")
    return flag.replace("_", "-") + dot + path + equals + value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _set_path(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        values[name] = values = inner if isinstance(inner, dict) else {}
    values[path[-1].replace("-", "_")] = value


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _last_value(tokens: list[str], flag: str) -> str | None:
    value = None
    for position, token in enumerate(tokens):
        name, has_value, text = token.partition("=")
        if name == flag and has_value:
            value = text
        elif name == flag and position + 1 < len(tokens):
            value = tokens[position + 1]
    return value


def _longest(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return max(
        (s for s in action.option_strings if not s.startswith("--no-")),
        key=len,
        default=action.option_strings[0],
    )


def _wrapped(words: list[str], width: int = 88) -> list[str]:
    lines, line = [], "  "
    for word in words:
        if len(line) + len(word) > width and line.strip():
            lines.append(line.rstrip())
            line = "  "
        line += word + "  "
    return [*lines, line.rstrip()]
