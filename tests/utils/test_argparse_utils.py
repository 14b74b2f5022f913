import pytest

from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    human_int,
    json_mapping,
    json_mapping_or_word,
)


@pytest.fixture
def parser():
    parser = FlexibleArgumentParser(prog="tool", description="A tool.")
    parser.add_config_argument()
    parser.add_argument("target", nargs="?")
    group = parser.add_argument_group("Limits", "How much.")
    group.add_argument("--max-size", type=human_int, default=1, help="of anything")
    group.add_argument("--names", nargs="+")
    group.add_argument("--key", action="append")
    group.add_argument("--flag", action="store_true", help="says yes")
    group.add_argument("--options", type=json_mapping)
    group.add_argument("--drafts", type=json_mapping_or_word, default="auto")
    return parser


def error_of(parser, argv, capsys):
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(argv)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def config(tmp_path, text):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_underscores_in_flags_are_dashes(parser):
    assert parser.parse_args(["--max_size=2K"]).max_size == 2048


def test_dotted_flags_make_a_mapping(parser):
    args = parser.parse_args(
        ["--options.mode", "fast", "--options.deep.limit=3", "--options.on", "target"]
    )
    # "target" is the value of --options.on: a bare one stands before another flag.
    assert args.options == {"mode": "fast", "deep": {"limit": 3}, "on": "target"}
    assert parser.parse_args(["--options.on", "--flag"]).options == {"on": True}


def test_dotted_flags_win_over_the_json_they_are_merged_into(parser):
    args = parser.parse_args(
        ["--options.a.b", "2", "--options", '{"a": {"b": 1, "c": 1}, "d": 1}']
    )
    assert args.options == {"a": {"b": 2, "c": 1}, "d": 1}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], "auto"),
        (["--drafts=null"], None),
        (["--drafts", "auto"], "auto"),
        (['--drafts={"a": 1}', "--drafts.b=2"], {"a": 1, "b": 2}),
        (["--drafts=null", "--drafts.b=2"], {"b": 2}),
        (["--drafts=auto", "--drafts.b=2"], {"b": 2}),
    ],
)
def test_a_word_can_stand_for_a_whole_mapping(parser, argv, value):
    assert parser.parse_args(argv).drafts == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("drafts: null", None),
        ("drafts:", None),
        ("drafts: auto", "auto"),
        ("drafts: {a: 1}", {"a": 1}),
        ("options: null", "auto"),
    ],
)
def test_null_in_the_file_is_a_value_where_it_means_something(
    parser, tmp_path, text, value
):
    args = parser.parse_args(["--config", config(tmp_path, text)])
    assert (args.drafts, args.options) == (value, None)


def test_unknown_flags_name_the_closest_one(parser, capsys):
    assert "did you mean --max-size?" in error_of(parser, ["--max-sise=1"], capsys)
    assert "did you mean --options?" in error_of(parser, ["--option.a", "1"], capsys)


def test_abbreviated_flags_are_unknown(parser, capsys):
    assert "unknown flag --max-si" in error_of(parser, ["--max-si", "1"], capsys)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--max-size", "1.5"], "not a whole number"),
        (["--options", "["], "not JSON"),
        (["--options", "[]"], "not a JSON object"),
        (["--options", "null"], "not a JSON object"),
        (["--drafts", "on"], "not JSON"),
        (["--options", "{", "--options.a", "1"], "not JSON"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--max-size.a", "1"], "unknown flag --max-size.a"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(parser, capsys, argv, reason):
    assert reason in error_of(parser, argv, capsys)


def test_the_file_gives_what_the_command_line_leaves_out(parser, tmp_path):
    path = config(
        tmp_path,
        "max_size: 4K\nnames: [a, b]\nkey: [x, y]\nflag: true\noptions: {mode: slow}\n",
    )
    args = parser.parse_args(["here", "--config", path])
    assert (args.target, args.max_size, args.names) == ("here", 4096, ["a", "b"])
    assert (args.key, args.flag, args.options) == (["x", "y"], True, {"mode": "slow"})


def test_the_command_line_wins_over_the_file(parser, tmp_path):
    path = config(
        tmp_path, "max-size: 4K\nkey: [x, y]\noptions: {mode: slow, level: 2}\n"
    )
    args = parser.parse_args(
        ["--config", path, "--max_size", "1", "--key=z", "--options.mode", "fast"]
    )
    assert (args.max_size, args.key) == (1, ["z"])
    assert args.options == {"mode": "fast", "level": 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-sise: 1", "unknown key max-sise (did you mean max-size?)"),
        ("config: x", "unknown key config"),
        ("flag: 3", "flag must be true or false"),
        ("max-size: {a: 1}", "takes one value, not a mapping"),
        ("max-size: [1, 2]", "takes one value, not a list"),
        ("- a", "must be a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(
    parser, tmp_path, capsys, text, reason
):
    argv = ["--config", config(tmp_path, text)]
    assert reason in error_of(parser, argv, capsys)


def test_a_missing_file_is_named(parser, capsys):
    message = error_of(parser, ["--config", "/nowhere/x.yaml"], capsys)
    assert "/nowhere/x.yaml: No such file" in message


@pytest.mark.parametrize(
    ("topic", "shown", "hidden"),
    [
        ([], "--help=listgroup", "of anything"),
        (["--help=all"], "of anything", "--help=listgroup"),
        (["--help=listgroup"], "Limits: How much.", "--max-size"),
        (["--help=limits"], "--names", "--config"),
        (["--help=max_size"], "of anything", "--names"),
        (["--help=YES"], "--flag", "--names"),
    ],
)
def test_help_is_about_its_topic(parser, capsys, topic, shown, hidden):
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(topic or ["--help"])
    text = capsys.readouterr().out
    assert raised.value.code == 0
    assert shown in text
    assert hidden not in text


def test_help_about_nothing_known_says_so(parser, capsys):
    assert "did you mean Limits?" in error_of(parser, ["--help=Limitz"], capsys)
