import os
import subprocess
import sys
import types

import pytest

from vllm.entrypoints.cli import main as cli
from vllm.exceptions import CheckpointError, VLLMValidationError
from vllm.version import __version__


def run(argv, capsys):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def command(monkeypatch):
    """Make `vllm serve` raise what the test says."""

    def install(error):
        def fail(argv):
            raise error

        module = types.SimpleNamespace(run=fail)
        monkeypatch.setattr(cli, "import_module", lambda name: module)

    return install


def test_the_overview_names_every_command(capsys):
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_no_command_is_wrong(capsys):
    assert run([], capsys)[0] == 2


def test_the_version_is_printed_alone(capsys):
    assert run(["--version"], capsys) == (0, f"{__version__}\n", "")


def test_an_unknown_command_names_the_closest_one(capsys):
    code, _, err = run(["sevre"], capsys)
    assert (code, err) == (2, "error: unknown command 'sevre' (did you mean serve?)\n")


def test_a_bad_environment_variable_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "-3")
    code, _, err = run(["collect-env"], capsys)
    assert code == 2
    assert err.startswith("error: VLLM_LOG_STATS_INTERVAL must be")


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("model.safetensors:\n  truncated"),
        OSError("model.safetensors: truncated"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(capsys, command, error):
    command(error)
    assert run(["serve"], capsys) == (1, "", "error: model.safetensors: truncated\n")


def test_a_value_that_does_not_fit_the_model_is_one_line_and_exit_code_2(
    capsys, command
):
    command(VLLMValidationError("max_model_len must be\n at most 8"))
    assert run(["serve"], capsys) == (2, "", "error: max_model_len must be at most 8\n")


def test_a_fault_of_the_program_is_not_hidden(command):
    command(AssertionError("broken"))
    with pytest.raises(AssertionError, match="broken"):
        cli.main(["serve"])


def test_an_interrupt_has_the_shells_exit_code(capsys, command):
    command(KeyboardInterrupt())
    assert run(["serve"], capsys)[0] == 130


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"]])
def test_help_loads_neither_torch_nor_the_web_framework(argv):
    code = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'fastapi')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import sys, types; from vllm.entrypoints.cli.main import run_command\n"
        "talk = types.ModuleType('talk'); talk.run = lambda argv: print('word') or 0\n"
        "sys.modules['talk'] = talk\n"
        "sys.exit(run_command('vllm', {'talk': ('talk', 'say')}, ['talk']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")
