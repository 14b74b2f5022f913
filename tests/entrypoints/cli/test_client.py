import pytest

from tests.stub_server import StubServer
from vllm.entrypoints.cli import chat, complete
from vllm.entrypoints.cli.main import main


@pytest.fixture
def server():
    stub = StubServer()
    yield stub
    stub.close()


@pytest.fixture
def url(server):
    return f"{server.url}/v1"


def typed(monkeypatch, lines):
    answers = iter(lines)

    def read(prompt):
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_a_quick_chat_prints_the_answer_and_ends(server, url, capsys):
    argv = ["--url", url, "-q", "hi", "--system-prompt", "be kind", "--max-tokens", "9"]
    assert chat.run(argv) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert server.bodies == [
        {
            "model": "stub",
            "stream": True,
            "max_completion_tokens": 9,
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "hi"},
            ],
        }
    ]


def test_a_chat_remembers_what_was_said(server, url, monkeypatch):
    typed(monkeypatch, ["a", "  ", "b"])
    chat.run(["--url", url])
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "a"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "one two three"},
            {"role": "user", "content": "b"},
        ],
    ]


def test_each_line_is_completed_on_its_own(server, url, monkeypatch, capsys):
    typed(monkeypatch, ["a", "b"])
    complete.run(["--url", url, "--max-tokens", "3"])
    assert [body["prompt"] for body in server.bodies] == ["a", "b"]
    assert capsys.readouterr().out == "one two three\n" * 2


def test_the_key_is_sent(server, url, monkeypatch):
    complete.run(["--url", url, "-q", "a", "--api-key", "k1"])
    monkeypatch.setenv("VLLM_API_KEY", "k2")
    complete.run(["--url", url, "-q", "a"])
    assert server.authorizations == ["Bearer k1", "Bearer k2"]


def test_a_refusal_is_one_line(url, capsys):
    code = main(["complete", "--url", url, "--model-name", "bad", "-q", "a"])
    assert (code, capsys.readouterr().err) == (1, "error: no such model\n")


def test_no_server_is_one_line(capsys):
    code = main(["chat", "--url", "http://127.0.0.1:1/v1", "-q", "a"])
    assert code == 1
    assert capsys.readouterr().err.startswith("error: no server at http://127.0.0.1:1")
