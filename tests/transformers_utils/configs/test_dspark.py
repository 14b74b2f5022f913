import json
from dataclasses import replace

import pytest

from vllm.exceptions import CheckpointError, UnsupportedError
from vllm.transformers_utils.config import parse_hf_config
from vllm.transformers_utils.configs.dspark import (
    check_fits_target,
    load_dspark_config,
    parse_dspark_config,
    to_speculators_json,
)

LAYERS = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
TARGET = parse_hf_config(
    LAYERS | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36}, "target"
)
DEEPSPEC = LAYERS | {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 36,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 2,
    "block_size": 7,
    "mask_token_id": 99,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],
    "speculators_version": "0.3.0",
    "transformer_layer_config": LAYERS,
    "draft_vocab_size": 100,
    "block_size": 7,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 99,
    "target_hidden_size": 64,
    "sample_from_anchor": True,
    "num_target_layers": 36,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def deepspec(**changes: object):
    return parse_dspark_config(DEEPSPEC | changes, "config.json")


def speculators(layers: dict | None = None, **changes: object):
    raw = SPECULATORS | changes
    raw["transformer_layer_config"] = LAYERS | (layers or {})
    return parse_dspark_config(raw, "config.json")


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


def test_numbers_of_deepspec_are_read():
    config = deepspec()
    assert config.backbone.architecture == "Qwen3ForCausalLM"
    assert config.num_draft_layers == 2
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.target_hidden_size == 64
    assert config.draft_vocab_size == 100
    assert config.num_draft_tokens == 7
    assert config.markov_rank == 8
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov
    assert not config.has_reduced_vocab
    assert config.confidence_temperatures == ()


def test_both_formats_of_one_net_are_the_same():
    assert speculators() == deepspec()


@pytest.mark.parametrize(
    ("proposal", "expected"),
    [
        ({"proposal_type": "greedy", "speculative_tokens": 2}, 2),
        ({"proposal_type": "greedy", "speculative_tokens": 7}, None),
        ({"proposal_type": "greedy", "speculative_tokens": 99}, None),
        ({"proposal_type": "greedy", "speculative_tokens": 0}, None),
        ({"proposal_type": "greedy", "speculative_tokens": "2"}, None),
        ({"proposal_type": "sample", "speculative_tokens": 2}, None),
        ("greedy", None),
    ],
)
def test_a_default_proposal_may_take_fewer_drafts_than_a_block_gives(
    proposal, expected
):
    advice = {"proposal_methods": [proposal], "default_proposal_method": "greedy"}
    config = speculators(speculators_config=advice)
    assert config.num_proposed_tokens == expected


@pytest.mark.parametrize("advice", [None, 3, [], {}, {"proposal_methods": {}}])
def test_without_a_proposal_all_drafts_are_taken(advice):
    assert speculators(speculators_config=advice).num_proposed_tokens is None


def test_llama_layers_are_read_in_both_formats():
    for config in (
        deepspec(architectures=["LlamaDSparkModel"], model_type="llama"),
        speculators({"model_type": "llama"}),
    ):
        assert config.backbone.architecture == "LlamaForCausalLM"


def test_defaults_of_deepspec_are_a_net_without_heads():
    raw = without(
        DEEPSPEC,
        *("enable_confidence_head", "confidence_head_with_markov"),
        *("markov_rank", "markov_head_type"),
    )
    config = parse_dspark_config(raw, "config.json")
    assert config.markov_rank == 0
    assert not config.enable_confidence_head


def test_defaults_of_speculators_are_both_heads_and_the_whole_vocabulary():
    raw = without(
        SPECULATORS,
        *("enable_confidence_head", "confidence_head_with_markov"),
        *("markov_rank", "markov_head_type", "draft_vocab_size", "target_hidden_size"),
        "num_target_layers",
    )
    config = parse_dspark_config(raw, "config.json")
    assert config.markov_rank == 256
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov
    assert config.draft_vocab_size == 100
    assert config.target_hidden_size == 64
    assert config.num_target_layers is None


def test_written_config_is_read_back_the_same(tmp_path):
    layers = {"bos_token_id": 1, "eos_token_id": [2, 3], "attention_bias": True}
    config = replace(
        speculators(layers, draft_vocab_size=40),
        confidence_temperatures=(1.5,) * 7,
        sample_from_anchor=True,
        num_proposed_tokens=4,
        allows_short_blocks=True,
    )
    raw = to_speculators_json(config, "some/target", "Qwen3ForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_dspark_config(str(tmp_path)) == config
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["Qwen3ForCausalLM"],
    }


def test_a_short_block_has_the_temperatures_of_its_drafts():
    temperatures = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
    config = replace(speculators(), confidence_temperatures=temperatures)
    assert config.shortened(3) == config
    short = replace(config, allows_short_blocks=True).shortened(3)
    assert short.num_draft_tokens == 3
    assert short.confidence_temperatures == temperatures[:3]


def test_trap_1_speculators_layer_ids_name_inputs_and_deepspec_ids_outputs():
    config = speculators(aux_hidden_state_layer_ids=[0, 2])
    assert config.target_layer_ids == (-1, 1)
    # The target's interface counts inputs, as speculators does.
    assert config.aux_hidden_state_layer_ids == (0, 2)
    assert deepspec().aux_hidden_state_layer_ids == (2, 10, 18, 26, 34)


def test_trap_2_a_missing_anchor_flag_means_yes_in_deepspec_and_no_in_speculators():
    assert deepspec().sample_from_anchor
    raw = without(SPECULATORS, "sample_from_anchor")
    config = parse_dspark_config(raw, "config.json")
    assert not config.sample_from_anchor
    assert config.num_draft_tokens == 6


@pytest.mark.parametrize("key", ["rope_interleave", "rope_interleaved"])
def test_trap_4_interleaved_rotation_is_noticed_in_both_formats(key):
    assert not deepspec().is_rope_interleaved
    assert deepspec(**{key: True}).is_rope_interleaved
    assert speculators({key: True}).is_rope_interleaved
    assert not deepspec(**{key: False}).is_rope_interleaved


@pytest.mark.parametrize("samples", [True, False])
def test_trap_5_slots_to_reserve_are_the_block_and_not_its_drafts(samples):
    config = speculators(sample_from_anchor=samples)
    assert config.num_lookahead_slots == 7
    assert config.num_draft_tokens == (7 if samples else 6)


@pytest.mark.parametrize("non_causal", [True, False])
def test_trap_6_sliding_windows_are_refused_causal_or_not(non_causal):
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(UnsupportedError, match="sliding_window_non_causal"):
        speculators(layers, sliding_window_non_causal=non_causal)


@pytest.mark.parametrize("vocab_size", [96, 128])
def test_trap_8_a_vocabulary_padded_otherwise_than_the_targets_is_refused(vocab_size):
    target = replace(TARGET, vocab_size=vocab_size)
    with pytest.raises(UnsupportedError, match=f"vocabulary.* 100.* {vocab_size}"):
        check_fits_target(deepspec(), target)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4"},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_trap_9_soft_capped_logits_are_refused(changes):
    with pytest.raises(UnsupportedError, match="Gemma4|final_logit_softcapping"):
        deepspec(**changes)


def test_a_drafter_that_fits_is_taken():
    check_fits_target(deepspec(), TARGET)
    check_fits_target(speculators(), TARGET)


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        ({}, {"hidden_size": 32}, "hidden size.* 64.* 32"),
        ({}, {"num_hidden_layers": 40}, "number of target layers.* 36.* 40"),
        ({"target_layer_ids": [1, 35]}, {}, "tapped layer.* 35.* 34"),
        ({"rope_theta": 500.0}, {}, "RoPE.*theta 500.*theta 10000"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {},
            "RoPE.*linear.*default",
        ),
        ({}, {"max_position_embeddings": 7}, "block size.* 7.* 7"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(draft, target, message):
    with pytest.raises(UnsupportedError, match=message):
        check_fits_target(deepspec(**draft), replace(TARGET, **target))


def test_draft_layers_narrower_than_the_embeddings_are_refused():
    with pytest.raises(UnsupportedError, match="draft layers.* 32.* 64"):
        check_fits_target(speculators({"hidden_size": 32}), TARGET)


def test_frequency_factors_of_a_gguf_target_fit_the_numbers_they_came_from():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    factors = {"rope_type": "llama3", "freq_factors": [1.0] * 8}
    target = replace(TARGET, rope_scaling=factors)
    check_fits_target(deepspec(rope_scaling=scaling), target)
    with pytest.raises(UnsupportedError, match="RoPE"):
        check_fits_target(deepspec(), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer > 0"),
        ({"block_size": None}, "block_size must be given"),
        ({"mask_token_id": 100}, "mask_token_id 100 is outside the vocabulary of 100"),
        ({"mask_token_id": None}, "mask_token_id must be an integer >= 0"),
        ({"target_layer_ids": []}, "target_layer_ids must be a list of layers"),
        ({"target_layer_ids": [3, 3]}, "target_layer_ids must rise, from -1"),
        ({"target_layer_ids": [-2, 3]}, "target_layer_ids must rise, from -1"),
        ({"markov_head_type": "lstm"}, "must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs a markov_rank"),
        ({"markov_rank": True}, "markov_rank must be an integer >= 0"),
        ({"confidence_temperatures": [1.0]}, "has 1 numbers, not one for each of 7"),
        ({"confidence_temperatures": [0.0] * 7}, "must be a list of numbers > 0"),
    ],
)
def test_wrong_numbers_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        deepspec(**changes)


def test_wrong_numbers_of_speculators_are_refused_by_name():
    with pytest.raises(CheckpointError, match="draft_vocab_size 101 is more than"):
        speculators(draft_vocab_size=101)
    with pytest.raises(CheckpointError, match="must rise, from 0"):
        speculators(aux_hidden_state_layer_ids=[-1, 2])
    with pytest.raises(CheckpointError, match="leaves no token to draft"):
        speculators(block_size=1, sample_from_anchor=False)
    with pytest.raises(CheckpointError, match="transformer_layer_config must be"):
        parse_dspark_config(SPECULATORS | {"transformer_layer_config": 3}, "here")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({}, "None"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        (SPECULATORS | {"transformer_layer_config": {"model_type": "gpt2"}}, "gpt2"),
    ],
)
def test_other_kinds_of_drafters_are_refused_by_name(raw, message):
    with pytest.raises(UnsupportedError, match=message):
        parse_dspark_config(raw, "config.json")
