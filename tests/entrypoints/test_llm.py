from types import SimpleNamespace

import pytest

from vllm.entrypoints import llm as llm_module
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams


class FakeEngine:
    """Answers the last request first; refuses the prompt "bad"."""

    def __init__(self):
        self.pending = []
        self.added = []
        self.aborted = []
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                default_sampling_params={"temperature": 0.25}, chat_template=None
            )
        )
        self.tokenizer = SimpleNamespace(
            chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            bos_token=None,
            eos_token="</s>",
            encode=lambda text, add_special_tokens: [len(text), add_special_tokens],
        )

    def get_tokenizer(self):
        return self.tokenizer

    def add_request(self, request_id, prompt, sampling_params, priority=0):
        if prompt == "bad":
            raise VLLMValidationError("bad prompt", parameter="prompt")
        self.pending.append(request_id)
        self.added.append((request_id, prompt, sampling_params, priority))

    def abort_request(self, request_ids):
        self.aborted += request_ids
        self.pending = [r for r in self.pending if r not in request_ids]

    def has_unfinished_requests(self):
        return bool(self.pending)

    def step(self):
        request_id = self.pending.pop()
        answer = CompletionOutput(0, f"to {request_id}", [1, 2], finish_reason="stop")
        (prompt,) = (one[1] for one in self.added if one[0] == request_id)
        text = prompt.get("prompt") if isinstance(prompt, dict) else None
        return [RequestOutput(request_id, text, [5], None, [answer], finished=True)]


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()
    factory = SimpleNamespace(from_engine_args=lambda args: engine)
    monkeypatch.setattr(llm_module, "LLMEngine", factory)
    return engine


@pytest.fixture
def llm(engine):
    return LLM()


def prompts_of(engine):
    return [prompt for _, prompt, _, _ in engine.added]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    outputs = llm.generate(["a", "b", "c"], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["to 0", "to 1", "to 2"]


def test_request_ids_are_never_used_twice(llm, engine):
    llm.generate("a", use_tqdm=False)
    llm.generate("a", use_tqdm=False)
    assert [request_id for request_id, *_ in engine.added] == ["0", "1"]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_token_ids": [1]}, [{"prompt_token_ids": [1]}]),
        (("a", {"prompt": "b"}), ["a", {"prompt": "b"}]),
        ([], []),
    ],
)
def test_a_prompt_is_a_text_token_ids_or_a_mapping(llm, engine, prompts, expected):
    assert len(llm.generate(prompts, use_tqdm=False)) == len(expected)
    assert prompts_of(engine) == expected


def test_one_set_of_parameters_serves_all_prompts_and_stays_the_callers(llm, engine):
    params = SamplingParams(max_tokens=3)
    llm.generate(["a", "b"], params, use_tqdm=False)
    assert [one.max_tokens for _, _, one, _ in engine.added] == [3, 3]
    assert {one.output_kind for _, _, one, _ in engine.added} == {
        RequestOutputKind.FINAL_ONLY
    }
    assert params.output_kind == RequestOutputKind.CUMULATIVE


def test_each_prompt_can_have_its_own_parameters_and_priority(llm, engine):
    params = [SamplingParams(max_tokens=n) for n in (1, 2)]
    llm.generate(["a", "b"], params, priority=[5, 6], use_tqdm=False)
    assert [(p.max_tokens, rank) for _, _, p, rank in engine.added] == [(1, 5), (2, 6)]


def test_no_parameters_are_the_models_defaults(llm, engine):
    llm.generate("a", use_tqdm=False)
    assert engine.added[0][2].temperature == 0.25
    assert llm.get_default_sampling_params().temperature == 0.25


@pytest.mark.parametrize(
    ("kwargs", "parameter"),
    [
        ({"sampling_params": [SamplingParams()]}, "sampling_params"),
        ({"priority": [1]}, "priority"),
    ],
)
def test_lists_of_the_wrong_length_are_refused(llm, engine, kwargs, parameter):
    with pytest.raises(VLLMValidationError, match="has 1 entries") as raised:
        llm.generate(["a", "b"], use_tqdm=False, **kwargs)
    assert raised.value.parameter == parameter
    assert engine.added == []


def test_a_refused_prompt_takes_back_those_before_it(llm, engine):
    with pytest.raises(VLLMValidationError, match="bad prompt"):
        llm.generate(["a", "b", "bad", "c"], use_tqdm=False)
    assert engine.aborted == ["0", "1"]
    assert not engine.has_unfinished_requests()
    assert len(llm.generate("d", use_tqdm=False)) == 1


def test_progress_is_shown_in_two_bars(llm, capsys):
    llm.generate(["a", "b"])
    shown = capsys.readouterr().err
    assert "Rendering prompts" in shown
    assert "Processed prompts: 100%" in shown
    assert "est. speed input: " in shown
    assert " toks/s, output: " in shown


def test_no_progress_is_silent(llm, capsys):
    llm.generate(["a"], use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_a_callable_takes_the_place_of_tqdm(llm):
    from tqdm import tqdm

    descriptions = []

    def make(*args, **kwargs):
        descriptions.append(kwargs["desc"])
        return tqdm(*args, **kwargs, disable=True)

    llm.generate(["a"], use_tqdm=make)
    assert descriptions == ["Rendering prompts", "Processed prompts"]


def test_a_chat_is_rendered_without_a_second_set_of_special_tokens(llm, engine):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    text = "<user>hi<assistant>"
    assert output.prompt == text
    assert prompts_of(engine) == [
        {"prompt": text, "prompt_token_ids": [len(text), False]}
    ]


def test_several_chats_are_answered_in_order(llm):
    chats = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(chats, use_tqdm=False)
    assert [output.prompt for output in outputs] == [
        "<user>a<assistant>",
        "<user>b<assistant>",
    ]


def test_a_model_without_a_template_says_so(llm, engine):
    engine.tokenizer.chat_template = None
    with pytest.raises(VLLMValidationError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


def test_an_unknown_argument_is_refused(engine):
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        LLM(max_modle_len=3)
