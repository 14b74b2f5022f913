from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, make_app
from tests.entrypoints.openai.serving import call, read_events

PATH = "/v1/completions"


async def complete(engine: FakeEngine | None = None, **fields: Any) -> Any:
    return await call(make_app(engine), PATH, {"prompt": "abc"} | fields)


async def choices(engine: FakeEngine | None = None, **fields: Any) -> list[dict]:
    response = await complete(engine, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def test_answer_has_the_shape_of_the_api() -> None:
    answer = (await complete()).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"]) == (0, "hell yes")
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": None,
    }


async def test_sixteen_tokens_unless_told_otherwise() -> None:
    (choice,) = await choices(FakeEngine(answer="x" * 40))
    assert choice["text"] == "x" * 16


async def test_index_is_prompt_times_n_plus_answer() -> None:
    engine = FakeEngine()
    answer = (await complete(engine, prompt=["ab", "cde"], n=2, echo=True)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:3] for c in answer["choices"]] == ["abh", "abh", "cde", "cde"]
    # Each prompt once, all answers.
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 4 * 6


@pytest.mark.parametrize("prompt", [[65, 66], [[65, 66]]])
async def test_prompt_may_be_token_ids(prompt: list) -> None:
    engine = FakeEngine()
    await choices(engine, prompt=prompt)
    assert engine.prompts == [[65, 66]]


@pytest.mark.parametrize("value", [None, False])
async def test_logprobs_null_or_false_are_none(value: Any) -> None:
    (choice,) = await choices(logprobs=value)
    assert choice["logprobs"] is None


async def test_logprobs_zero_shows_the_tokens_alone() -> None:
    (choice,) = await choices(logprobs=0)
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 6
    assert choice["logprobs"]["top_logprobs"][0] == {"hell": -0.5}


async def test_logprobs_are_four_lists_of_one_entry_a_token() -> None:
    (choice,) = await choices(logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["hell", " ", "y", "e", "s", "<eos>"],
        "text_offset": [0, 4, 5, 6, 7, 8],
        "token_logprobs": [-0.5] * 6,
        "top_logprobs": [
            {"hell": -0.5, "x": -1.0},
            {" ": -0.5, "x": -1.0},
            {"y": -0.5, "x": -1.0},
            {"e": -0.5, "x": -1.0},
            {"s": -0.5, "x": -1.0},
            {"<eos>": -0.5, "x": -1.0},
        ],
    }


async def test_echo_puts_prompt_and_its_logprobs_before_the_answer() -> None:
    (choice,) = await choices(echo=True, logprobs=1, max_tokens=1)
    assert choice["text"] == "abchell"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "hell"],
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -3.0, -3.0, -0.5],
        "top_logprobs": [
            None,
            {"x": -1.0, "b": -3.0},
            {"x": -1.0, "c": -3.0},
            {"hell": -0.5},
        ],
    }


async def test_echo_without_new_tokens_scores_the_prompt() -> None:
    answer = (await complete(echo=True, logprobs=1, max_tokens=0)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -3.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


async def test_echo_of_token_ids_is_their_text() -> None:
    engine = FakeEngine()
    ids = engine.tokenizer.encode("xyz")
    (choice,) = await choices(engine, prompt=ids, echo=True)
    assert choice["text"] == "xyzhell yes"


async def test_echo_of_a_cut_prompt_is_what_was_kept() -> None:
    (choice,) = await choices(echo=True, truncate_prompt_tokens=2)
    assert choice["text"] == "bchell yes"


async def test_prompt_logprobs_keep_as_many_as_asked_for() -> None:
    (choice,) = await choices(prompt_logprobs=0, echo=True, logprobs=2)
    assert choice["prompt_logprobs"][0] is None
    assert [len(row) for row in choice["prompt_logprobs"][1:]] == [1, 1]


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
@pytest.mark.parametrize("echo", [False, True])
async def test_deltas_join_to_the_answer(tokens_per_step: int, echo: bool) -> None:
    fields = {
        "prompt": ["abc", "é"],
        "n": 2,
        "echo": echo,
        "logprobs": 2,
        "return_token_ids": True,
    }
    whole = await choices(FakeEngine(answer="hell é"), **fields)
    engine = FakeEngine(answer="hell é", tokens_per_step=tokens_per_step)
    response = await complete(engine, stream=True, **fields)
    parts = [event["choices"][0] for event in read_events(response)]
    assert len(whole) == 4
    for expected in whole:
        own = [part for part in parts if part["index"] == expected["index"]]
        assert "".join(part["text"] for part in own) == expected["text"]
        assert [i for part in own for i in part["token_ids"]] == expected["token_ids"]
        for name, values in expected["logprobs"].items():
            joined = [v for p in own if p["logprobs"] for v in p["logprobs"][name]]
            assert joined == values
        assert own[-1]["finish_reason"] == expected["finish_reason"]
        assert own[0]["prompt_token_ids"] == expected["prompt_token_ids"]


async def test_stream_usage_sums_prompts_and_answers() -> None:
    response = await complete(
        prompt=["ab", "cde"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = read_events(response)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5 + 4 * 6


async def test_chunks_have_finish_reason_and_logprobs() -> None:
    for event in read_events(await complete(stream=True)):
        assert {"finish_reason", "logprobs", "text", "index"} <= set(
            event["choices"][0]
        )


async def test_failure_of_one_prompt_ends_the_others() -> None:
    engine = FakeEngine(step_delay_s=0.01)
    response = await complete(engine, prompt=[[65], [10**6]])
    assert response.status_code == 400
    assert engine.num_running == 0
