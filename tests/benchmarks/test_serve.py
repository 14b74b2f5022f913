import json

import pytest

from tests.stub_server import StubServer
from vllm.benchmarks import serve
from vllm.entrypoints.cli.main import main


@pytest.fixture
def server():
    stub = StubServer()
    yield stub
    stub.close()


def run(server, *argv):
    return serve.run(["--port", str(server.port), "--disable-tqdm", *argv])


def test_random_prompts_are_tokens_of_the_servers_tokenizer(server, capsys):
    code = run(
        server, "--num-prompts", "3", "--random-input-len", "6", "--num-warmups", "1"
    )
    assert code == 0
    assert len(server.bodies) == 4
    for body in server.bodies:
        assert body["model"] == "stub"
        assert len(body["prompt"]) == 6
        assert set(body["prompt"]) <= {7, 8, 9}
        assert body["stream_options"] == {"include_usage": True}
    assert "Successful requests:                     3\n" in capsys.readouterr().out


def test_a_server_without_tokenize_gets_words():
    stub = StubServer(has_tokenize=False)
    try:
        run(stub, "--num-prompts", "1", "--random-input-len", "6", "--num-warmups", "0")
    finally:
        stub.close()
    assert len(stub.bodies[0]["prompt"].split()) == 6


def test_chats_are_timed_from_the_first_token_not_the_role(server, tmp_path, capsys):
    run(
        server,
        "--backend=openai-chat",
        "--num-prompts=2",
        "--ignore-eos",
        "--extra-body.temperature=0",
        "--save-result",
        f"--result-dir={tmp_path}",
        "--result-filename=result.json",
    )
    assert server.bodies[0]["messages"][0]["role"] == "user"
    assert server.bodies[0]["temperature"] == 0
    assert server.bodies[0]["ignore_eos"] is True
    figures = json.loads((tmp_path / "result.json").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 6)
    assert figures["total_input_tokens"] == 10
    assert figures["mean_ttft_ms"] > 0


def test_no_more_requests_than_allowed_are_in_flight(server, tmp_path):
    run(
        server,
        "--num-prompts=6",
        "--max-concurrency=2",
        "--save-result",
        f"--result-dir={tmp_path}",
        "--result-filename=result.json",
    )
    figures = json.loads((tmp_path / "result.json").read_text())
    assert figures["max_concurrent_requests"] <= 2


def test_the_rate_spreads_the_requests(server, tmp_path):
    run(
        server,
        "--num-prompts=4",
        "--request-rate=20",
        "--burstiness=1000",
        "--save-result",
        f"--result-dir={tmp_path}",
        "--result-filename=result.json",
    )
    figures = json.loads((tmp_path / "result.json").read_text())
    # Three gaps of 50 ms, almost even at this burstiness.
    assert figures["duration"] > 0.13


def test_the_key_is_sent_with_every_request(server, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run(server, "--num-prompts=2", "--num-warmups=1")
    # One asks for tokens.
    assert server.authorizations == ["Bearer secret"] * 4


def test_an_address_that_is_none_is_one_line(capsys):
    code = main(["bench", "serve", "--base-url=ftp://host", "--model=stub"])
    assert code == 1
    assert capsys.readouterr().err == (
        "error: ftp://host/v1/completions: not an address of http or https\n"
    )


def test_a_server_that_refuses_is_one_line(server, capsys):
    code = main(["bench", "serve", f"--port={server.port}", "--model=bad"])
    message = capsys.readouterr().err
    assert code == 1
    assert message.startswith("error: the first request failed: HTTP 400")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--percentile-metrics=ttft,speed"], "unknown speed"),
        (["--metric-percentiles=50,high"], "numbers from 0 to 100"),
        (["--request-rate=0"], "above 0"),
        (["--max-concurrency=0"], "at least 1"),
        (["--random-range-ratio=2"], "from 0 to 1"),
        (["--dataset-name=custom"], "needs --dataset-path"),
    ],
)
def test_wrong_settings_send_nothing(server, capsys, argv, reason):
    with pytest.raises(SystemExit) as raised:
        run(server, *argv)
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err
    assert server.bodies == []
