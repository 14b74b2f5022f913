"""The official client against the server, over a real socket."""

from collections.abc import Iterator

import openai
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import run_server

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        run_server(lambda: make_app(api_key=("key",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "vllm"


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HI, logprobs=True, top_logprobs=5
    )
    assert answer.choices[0].message.content == "hell yes"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_chat_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hell yes"
    assert chunks[-1].usage.completion_tokens == 6


def test_stream_helper_assembles_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HI) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "hell yes"
    assert answer.choices[0].finish_reason == "stop"


def test_completions_answer_and_stream(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", echo=True, logprobs=1)
    assert answer.choices[0].text == "ahell yes"
    chunks = client.completions.create(model="fake", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hell yes"


def test_errors_have_the_classes_of_the_client(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="nope", messages=HI)
    assert not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad_request:
        create(model="fake", messages=HI, temperature=-1)
    assert bad_request.value.param == "temperature"
    assert bad_request.value.type == "BadRequestError"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize(
    ("fails_after", "error"),
    [(0, openai.InternalServerError), (2, openai.APIError)],
)
def test_failure_is_a_clean_error_of_the_client(
    fails_after: int, error: type[Exception]
) -> None:
    with (
        run_server(lambda: make_app(FakeEngine(fails_after=fails_after))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
        pytest.raises(error, match="Internal server error"),
    ):
        list(client.chat.completions.create(model="fake", messages=HI, stream=True))
