import pytest

from tests.v1.engine.fakes import NUM_PADDED_IDS, make_config
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.transformers_utils.tokenizer import Tokenizer, TokenizerSettings
from vllm.v1.engine.input_processor import InputProcessor


@pytest.fixture
def make_processor(tokenizer_path, tokenizer):
    def make(**config):
        return InputProcessor(make_config(tokenizer_path, **config), tokenizer)

    return make


@pytest.fixture
def process(make_processor):
    processor = make_processor()

    def run(prompt="abc", **params):
        options = {
            name: params.pop(name)
            for name in ("priority", "cache_salt")
            if name in params
        }
        return processor.process_inputs(
            "r", prompt, SamplingParams(**params), **options
        )

    return run


def refused_parameter(process, *args, **kwargs):
    with pytest.raises(VLLMValidationError) as caught:
        process(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value.parameter


@pytest.mark.parametrize(
    "prompt", ["abc", {"prompt": "abc"}, {"prompt_token_ids": None, "prompt": "abc"}]
)
def test_text_is_tokenized(process, tokenizer, prompt):
    text, request = process(prompt)
    assert text == "abc"
    assert request.prompt_token_ids == tokenizer.encode("abc")


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}])
def test_token_ids_are_taken_as_they_are(process, prompt):
    text, request = process(prompt)
    assert (text, request.prompt_token_ids) == (None, [5, 6])


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        None,
        7,
        {"text": "abc"},
        {"prompt": ["abc"]},
        {"prompt_token_ids": "abc"},
        [1, "a"],
        [1, True],
        [1.0],
        [[1]],
        [-1],
        [2**40],
        "lone \ud800 surrogate",
    ],
)
def test_what_is_no_prompt_is_refused(process, prompt):
    assert refused_parameter(process, prompt) == "prompt"


def test_padded_ids_of_the_model_are_in_its_vocabulary(process, tokenizer):
    last = tokenizer.max_token_id + NUM_PADDED_IDS
    assert process([last])[1].prompt_token_ids == [last]
    assert refused_parameter(process, [last + 1]) == "prompt"


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("stop_token_ids", lambda i: [i]),
        ("allowed_token_ids", lambda i: [1, i]),
        ("logprob_token_ids", lambda i: [i]),
        ("logit_bias", lambda i: {i: 1.0}),
    ],
)
@pytest.mark.parametrize("token_id", [-1, 268, 2**40])
def test_ids_outside_the_model_are_refused(process, name, of, token_id):
    assert refused_parameter(process, **{name: of(token_id)}) == name


def test_the_bound_is_the_vocabulary_itself(process):
    assert process(stop_token_ids=[267])[1].sampling_params.stop_token_ids == [267]


def test_a_tokenizer_larger_than_the_model_is_no_excuse(make_processor, tokenizer):
    processor = make_processor()
    processor.tokenizer = Tokenizer(
        tokenizer.backend, TokenizerSettings(eos_token="<eos>")
    )
    small = processor._model_config.vocab_size
    ids = [small]
    processor.tokenizer.encode = lambda text, add_special_tokens=True: ids
    with pytest.raises(VLLMValidationError, match="vocabulary"):
        processor.process_inputs("r", "abc", SamplingParams())


def test_max_tokens_defaults_to_what_is_left(process):
    assert process("abc", max_tokens=None)[1].sampling_params.max_tokens == 61


def test_an_explicit_max_tokens_must_fit(process):
    assert process("abc", max_tokens=61)[1].sampling_params.max_tokens == 61
    assert refused_parameter(process, "abc", max_tokens=62) == "max_tokens"


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(process):
    with pytest.raises(VLLMValidationError, match=r"64 tokens.* 64 tokens"):
        process("x" * 64, max_tokens=1)


def test_a_text_that_cannot_fit_is_not_tokenized(make_processor, monkeypatch):
    processor = make_processor()

    def encode(text, add_special_tokens=True):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(processor.tokenizer, "encode", encode)
    with pytest.raises(VLLMValidationError, match="100000 characters"):
        processor.process_inputs("r", "x" * 100_000, SamplingParams())


@pytest.mark.parametrize(("name", "limit"), [("bad_words", 256), ("stop", 1024)])
def test_a_string_of_many_characters_is_refused(process, name, limit):
    assert process(**{name: ["a" * limit]})
    assert refused_parameter(process, **{name: ["b", "a" * (limit + 1)]}) == name


def test_truncation_keeps_the_end(process):
    _, request = process(list(range(10)), truncate_prompt_tokens=3)
    assert request.prompt_token_ids == [7, 8, 9]


def test_truncation_by_minus_one_leaves_room_for_the_output(process):
    _, request = process([1] * 200, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(request.prompt_token_ids) == 54


def test_truncation_to_more_than_the_context_is_refused(process):
    parameter = refused_parameter(process, truncate_prompt_tokens=65)
    assert parameter == "truncate_prompt_tokens"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [21, -1])
def test_more_logprobs_than_the_server_gives_are_refused(process, name, value):
    assert refused_parameter(process, **{name: value}) == name


def test_the_whole_vocabulary_can_be_allowed(make_processor):
    processor = make_processor(max_logprobs=-1)
    params = SamplingParams(logprobs=-1)
    _, request = processor.process_inputs("r", "abc", params)
    assert request.sampling_params.logprobs == -1


def test_every_known_eos_ends_the_text(make_processor, tokenizer):
    processor = make_processor(eos_token_ids=(7,), generation_eos_token_ids=(8, 7))
    params = SamplingParams(stop_token_ids=[3])
    _, request = processor.process_inputs("r", "abc", params)
    assert request.sampling_params.eos_token_id == tokenizer.eos_token_id
    assert request.sampling_params.all_stop_token_ids == [
        3,
        7,
        8,
        tokenizer.eos_token_id,
    ]
    assert request.sampling_params.stop_token_ids == [3]


def test_ignore_eos_leaves_only_the_callers_stop_tokens(make_processor):
    processor = make_processor(eos_token_ids=(7,))
    params = SamplingParams(stop_token_ids=[3], ignore_eos=True)
    _, request = processor.process_inputs("r", "abc", params)
    assert request.sampling_params.all_stop_token_ids == [3]


def test_bad_words_are_encoded_alone_and_behind_a_blank(process, tokenizer):
    _, request = process(bad_words=["he"])
    assert request.sampling_params.bad_words_token_ids == [
        tokenizer.encode("he"),
        tokenizer.encode(" he"),
    ]


def test_the_callers_parameters_are_not_changed(process, make_processor):
    params = SamplingParams(max_tokens=None)
    make_processor().process_inputs("r", "abc", params)
    assert params.max_tokens is None
    assert params.eos_token_id is None


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"allowed_token_ids": [5], "bad_words": ["&"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [259], "min_tokens": 1}, "min_tokens"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [6], "max_tokens": None},
            "stop_token_ids",
        ),
        ({"min_tokens": 62, "max_tokens": None}, "min_tokens"),
    ],
)
def test_contradictions_are_refused(process, tokenizer, params, parameter):
    assert (tokenizer.encode("&"), tokenizer.eos_token_id) == ([5], 259)
    assert refused_parameter(process, **params) == parameter


def test_a_wrong_schema_is_refused_before_the_engine(process):
    wrong = StructuredOutputsParams(json={"type": "foo"})
    parameter = refused_parameter(process, structured_outputs=wrong)
    assert parameter.startswith("structured_outputs")


def test_a_priority_needs_the_policy(process, make_processor):
    assert refused_parameter(process, priority=1) == "priority"
    processor = make_processor(policy="priority")
    _, request = processor.process_inputs("r", "abc", SamplingParams(), priority=-3)
    assert request.priority == -3


@pytest.mark.parametrize("priority", [True, 1.5, 2**40, "1"])
def test_a_priority_is_a_small_integer(make_processor, priority):
    processor = make_processor(policy="priority")
    with pytest.raises(VLLMValidationError) as caught:
        processor.process_inputs("r", "abc", SamplingParams(), priority=priority)
    assert caught.value.parameter == "priority"


@pytest.mark.parametrize("cache_salt", ["", 5])
def test_a_cache_salt_is_text(process, cache_salt):
    assert refused_parameter(process, cache_salt=cache_salt) == "cache_salt"


def test_zero_max_tokens_runs_the_model_once(process):
    assert process(max_tokens=0)[1].sampling_params.max_tokens == 1
