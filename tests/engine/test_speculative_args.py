import json

import pytest

from vllm.config import ModelConfig
from vllm.engine.speculative_args import (
    check_speculative_keys,
    resolve_speculative_config,
)
from vllm.exceptions import UnsupportedError, VLLMValidationError
from vllm.transformers_utils.config import parse_hf_config

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
DSPARK = TARGET | {
    "architectures": ["LlamaDSparkModel"],
    "num_hidden_layers": 1,
    "block_size": 6,
    "mask_token_id": 99,
    "target_layer_ids": [0, 2],
    "markov_rank": 8,
}
DFLASH = DSPARK | {"markov_rank": 0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def write(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def target(max_model_len=48):
    return ModelConfig(
        model="target",
        tokenizer="target",
        served_model_name=("target",),
        hf_config=parse_hf_config(TARGET, "config.json"),
        dtype="float32",
        max_model_len=max_model_len,
    )


def resolve(folder, raw, max_model_len=48, **keys):
    values = {"model": write(folder, raw)} | keys
    return resolve_speculative_config(values, target(max_model_len))


def test_a_block_drafter_drafts_as_much_as_a_block_gives(tmp_path):
    config = resolve(tmp_path, DSPARK, method="dspark")
    assert (config.method, config.num_speculative_tokens) == ("dspark", 6)
    assert config.num_lookahead_tokens == 6
    config = resolve(tmp_path, DSPARK | {"sample_from_anchor": False}, method="dspark")
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (5, 6)


def test_only_a_drafter_with_a_cache_needs_room_ahead(tmp_path):
    values = {"model": write(tmp_path, TARGET), "num_speculative_tokens": 3}
    assert resolve_speculative_config(values, target()).num_lookahead_tokens == 3
    assert resolve_speculative_config(NGRAM, target()).num_lookahead_tokens == 0


def test_fewer_drafts_are_read_from_whole_blocks(tmp_path):
    config = resolve(tmp_path, DSPARK, method="dspark", num_speculative_tokens=2)
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (2, 6)


def test_more_drafts_than_a_block_gives_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="has 6, .* num_speculative_tokens 7"):
        resolve(tmp_path, DSPARK, method="dspark", num_speculative_tokens=7)


@pytest.mark.parametrize(
    ("raw", "method"),
    [(DSPARK, "dspark"), (DFLASH, "dspark"), (TARGET, "draft_model")],
)
def test_the_checkpoint_says_its_method(tmp_path, raw, method):
    config = resolve(tmp_path, raw, num_speculative_tokens=3)
    assert config.method == method
    assert (config.dspark_config is None) == (method == "draft_model")
    assert (config.draft_hf_config is None) == (method == "dspark")


def test_a_draft_model_needs_a_number_of_drafts(tmp_path):
    with pytest.raises(VLLMValidationError, match="num_speculative_tokens"):
        resolve(tmp_path, TARGET)


def test_dflash_is_a_block_drafter_without_heads(tmp_path):
    assert resolve(tmp_path, DFLASH, method="dflash").num_speculative_tokens == 6
    with pytest.raises(UnsupportedError, match="its method is dspark, not dflash"):
        resolve(tmp_path, DSPARK, method="dflash")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
    ],
)
def test_other_drafters_are_refused_by_name(tmp_path, raw, message):
    with pytest.raises(UnsupportedError, match=message):
        resolve(tmp_path, raw)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="has 104, the target 100"):
        resolve(tmp_path, DSPARK | {"vocab_size": 104})


def test_draft_positions_are_the_least_that_anybody_has(tmp_path):
    assert resolve(tmp_path, DSPARK).max_model_len == 48
    assert resolve(tmp_path, DSPARK, max_model_len=64).max_model_len == 64
    short = DSPARK | {"max_position_embeddings": 40}
    assert resolve(tmp_path, short).max_model_len == 40
    with pytest.raises(UnsupportedError, match="6 tokens, more than the 5 positions"):
        resolve(tmp_path, DSPARK, max_model_len=5)


@pytest.mark.parametrize("method", ["dspark", "dflash", "draft_model"])
def test_a_drafter_must_be_named(method):
    with pytest.raises(VLLMValidationError, match="must name the drafter"):
        check_speculative_keys({"method": method, "num_speculative_tokens": 2})


def test_a_synthetic_length_is_checked_against_the_blocks_drafts(tmp_path):
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    config = resolve(tmp_path, DSPARK, **keys)
    assert config.synthetic_acceptance_rates == (1.0, 0.5, 0.0, 0.0, 0.0, 0.0)
    keys["synthetic_acceptance_length"] = 8
    with pytest.raises(VLLMValidationError, match="from 1 to 7"):
        resolve(tmp_path, DSPARK, **keys)


def test_only_drawn_drafts_have_distributions(tmp_path):
    assert not resolve(tmp_path, DSPARK).has_draft_distributions
    keys = {"draft_sample_method": "probabilistic"}
    assert resolve(tmp_path, DSPARK, **keys).has_draft_distributions
    config = resolve_speculative_config(NGRAM, target())
    assert not config.has_draft_distributions


SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({}, "method"),
        ({"num_speculative_tokens": 2}, "method"),
        (NGRAM | {"method": "ngarm"}, "method"),
        (NGRAM | {"method": ["ngram"]}, "method"),
        (NGRAM | {"lookup_max": 3}, "lookup_max"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 65}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": "2"}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        (NGRAM | {"draft_sample_method": None}, "draft_sample_method"),
        (NGRAM | {"rejection_sample_method": "loose"}, "rejection_sample_method"),
        (NGRAM | {"synthetic_acceptance_length": 2}, "rejection_sample_method"),
        (SYNTHETIC, "synthetic_acceptance_rates"),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": 0.5},
            "synthetic_acceptance_rates",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [True, False]},
            "synthetic_acceptance_rates",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [0.4, 0.5]},
            "synthetic_acceptance_rates",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_length": True},
            "synthetic_acceptance_length",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_length": float("nan")},
            "synthetic_acceptance_length",
        ),
        # What would have no effect.
        (NGRAM | {"model": "m"}, "model"),
        (NGRAM | {"max_model_len": 9}, "max_model_len"),
        (NGRAM | {"draft_sample_method": "probabilistic"}, "draft_sample_method"),
        (
            {"model": "m", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
            "prompt_lookup_max",
        ),
        ({"model": "", "num_speculative_tokens": 2}, "model"),
        ({"model": 5, "num_speculative_tokens": 2}, "model"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_key(values, parameter):
    with pytest.raises(VLLMValidationError) as info:
        check_speculative_keys(values)
    assert info.value.parameter == f"speculative_config.{parameter}"
    assert f"speculative_config.{parameter}" in str(info.value)


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(UnsupportedError, match="104 tokens, the target of 100"):
        resolve(tmp_path, TARGET | {"vocab_size": 104}, num_speculative_tokens=2)
