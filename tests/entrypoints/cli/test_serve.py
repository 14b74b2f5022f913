import sys
import types

import pytest

from vllm.entrypoints.cli import serve


@pytest.fixture
def served(monkeypatch):
    """Take the place of the server, and keep what it was asked to serve."""
    calls = []
    module = types.ModuleType("vllm.entrypoints.openai.api_server")
    module.run_server = calls.append
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_the_positional_model_is_the_model(served):
    assert serve.run(["some/model", "--port", "9000"]) == 0
    assert (served[0].model, served[0].port) == ("some/model", 9000)


def test_no_model_is_left_to_the_engine(served):
    assert serve.run([]) == 0
    assert served[0].model is None


def test_the_server_listens_on_loopback_by_default(served):
    serve.run([])
    assert served[0].host == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["a", "--model", "b"], "two models"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--structured-outputs-config.backnd", "auto"], "did you mean backend"),
        (["--dtype", "int8"], "--dtype"),
        (["--prot", "1"], "did you mean --port"),
    ],
)
def test_a_wrong_command_line_starts_nothing(served, capsys, argv, reason):
    with pytest.raises(SystemExit) as raised:
        serve.run(argv)
    message = capsys.readouterr().err
    assert raised.value.code == 2
    assert reason in message
    assert message.count("\n") == 1
    assert served == []
