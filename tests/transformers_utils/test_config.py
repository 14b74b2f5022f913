import json

import pytest

from tests.transformers_utils.gguf_builder import write_tokenizer
from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.transformers_utils.config import (
    load_generation_config,
    load_hf_config,
    parse_hf_config,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}


def parse(**changes: object):
    return parse_hf_config(LLAMA | changes, "config.json")


def test_numbers_are_read_and_completed():
    config = parse()
    assert config.head_dim == 16
    assert config.num_key_value_heads == 2
    assert config.eos_token_ids == (2, 3)
    assert config.bos_token_id == 1
    assert config.torch_dtype == "bfloat16"
    assert config.rope_theta == 500000.0
    assert config.rope_scaling is None
    assert not config.attention_bias
    assert not config.tie_word_embeddings


def test_missing_kv_heads_are_as_many_as_query_heads():
    assert parse(num_key_value_heads=None).num_key_value_heads == 4


def test_both_forms_of_rope_settings_are_the_same():
    old = parse(rope_scaling=LLAMA3)
    new = parse(rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    older = parse(
        rope_scaling={k: v for k, v in LLAMA3.items() if k != "rope_type"}
        | {"type": "llama3"}
    )
    assert old.rope_scaling == LLAMA3
    assert old == new == older


def test_both_names_of_the_dtype_are_read():
    assert parse(torch_dtype=None, dtype="float16").torch_dtype == "float16"


@pytest.mark.parametrize(
    ("architecture", "has_bias", "expected"),
    [
        ("LlamaForCausalLM", True, (True, True)),
        ("Qwen2ForCausalLM", False, (True, False)),
        ("Qwen3ForCausalLM", False, (False, False)),
        ("Qwen3ForCausalLM", True, (True, True)),
    ],
)
def test_biases_follow_the_architecture(architecture, has_bias, expected):
    config = parse(architectures=[architecture], attention_bias=has_bias)
    assert (config.attention_bias, config.attention_out_bias) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "architectures must name"),
        ({"vocab_size": None}, "vocab_size must be given"),
        ({"vocab_size": "100"}, "vocab_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer > 0"),
        ({"hidden_size": 66}, "hidden_size must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": -2}, "eos_token_id must be a token id"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor must be given"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "factor must be a number"),
    ],
)
def test_wrong_numbers_are_refused_by_name(changes, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        parse(**changes)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"\(gptq\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, reason):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def test_code_of_a_model_never_runs(tmp_path):
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()"
    (tmp_path / "modeling_mine.py").write_text(code)
    changes = {
        "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_mine.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(UnsupportedError, match="its own code, which is never run"):
        load_hf_config(str(tmp_path))
    assert not canary.exists()


def test_auto_map_of_a_known_architecture_is_not_needed(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(f"open({str(canary)!r}, 'w').close()")
    changes = {"auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    assert load_hf_config(str(tmp_path)) == parse()
    assert not canary.exists()


def test_embedded_model_is_what_its_file_says(embedded_model):
    config = load_hf_config(embedded_model)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.head_dim, config.intermediate_size) == (64, 1536)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope_theta == 100000.0
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_gguf_without_numbers_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "a.gguf", "gpt2", ["a"])
    with pytest.raises(CheckpointError, match="must be given"):
        load_hf_config(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "[" * 100_000])
def test_damaged_config_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load_hf_config(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_directory_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load_hf_config(str(tmp_path))


def test_generation_config_is_read_where_there_is_one(tmp_path, embedded_model):
    assert load_generation_config(str(tmp_path)) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "eos_token_id": [5]}')
    expected = {"temperature": 0.6, "eos_token_id": [5]}
    assert load_generation_config(str(tmp_path)) == expected
    assert load_generation_config(str(path)) == expected
    assert load_generation_config(embedded_model) == {}


def test_damaged_generation_config_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text("no")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is not JSON"):
        load_generation_config(str(tmp_path))
