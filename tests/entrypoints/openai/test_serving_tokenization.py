import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import call

HI = [{"role": "user", "content": "hi"}]


async def test_text_becomes_token_ids() -> None:
    answer = (await call(make_app(), "/tokenize", {"prompt": "hell"})).json()
    assert answer == {
        "count": 1,
        "max_model_len": 4096,
        "tokens": FakeEngine().tokenizer.encode("hell"),
        "token_strs": None,
    }


async def test_token_strings_are_told_on_request() -> None:
    body = {"prompt": "hell o", "return_token_strs": True}
    answer = (await call(make_app(), "/tokenize", body)).json()
    assert answer["token_strs"] == ["hell", "Ġ", "o"]


async def test_messages_are_rendered_as_in_chat() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    await call(app, "/v1/chat/completions", {"messages": HI})
    answer = (await call(app, "/tokenize", {"messages": HI})).json()
    assert answer["tokens"] == engine.prompts[0]


async def test_detokenize_undoes_tokenize() -> None:
    app = make_app()
    text = "hell é <eos>"
    tokens = (await call(app, "/tokenize", {"prompt": text})).json()["tokens"]
    answer = await call(app, "/detokenize", {"tokens": tokens})
    assert answer.json() == {"prompt": text}


@pytest.mark.parametrize("token_id", [-1, 10**5, 2**40, 2**70, 1.5, "a", None])
async def test_detokenize_refuses_what_is_no_token(token_id: object) -> None:
    response = await call(make_app(), "/detokenize", {"tokens": [token_id]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}])
async def test_tokenize_needs_text_or_messages(body: dict) -> None:
    assert (await call(make_app(), "/tokenize", body)).status_code == 400


async def test_detokenize_of_nothing_is_empty() -> None:
    answer = await call(make_app(), "/detokenize", {"tokens": []})
    assert answer.json() == {"prompt": ""}


async def test_unknown_model_is_404() -> None:
    response = await call(make_app(), "/tokenize", {"prompt": "a", "model": "x"})
    assert response.status_code == 404
