import json
from dataclasses import replace

import pytest

from vllm.config import ModelConfig
from vllm.engine import speculative_args
from vllm.engine.speculative_args import (
    check_speculative_config,
    describe_speculation,
    resolve_speculative_config,
)
from vllm.exceptions import CheckpointError, UnsupportedError, VLLMValidationError
from vllm.transformers_utils.config import parse_hf_config
from vllm.transformers_utils.configs.dspark import (
    parse_dspark_config,
    to_speculators_json,
)

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
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").touch()
    return str(folder)


def target(max_model_len=48, model="target"):
    return ModelConfig(
        model=model,
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


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (1, 1), (4, 4)])
def test_a_drafter_proposes_its_number_of_drafts_unless_told_otherwise(
    tmp_path, asked, expected
):
    config = replace(parse_dspark_config(DSPARK, "config.json"), num_proposed_tokens=2)
    raw = to_speculators_json(config, "target", "LlamaForCausalLM")
    resolved = resolve(tmp_path, raw, num_speculative_tokens=asked)
    assert resolved.num_speculative_tokens == expected


def test_only_a_drafter_with_a_cache_needs_room_ahead(tmp_path):
    values = {"model": write(tmp_path, TARGET), "num_speculative_tokens": 3}
    assert resolve_speculative_config(values, target()).num_lookahead_tokens == 3
    assert resolve_speculative_config(NGRAM, target()).num_lookahead_tokens == 0


def test_trap_3_fewer_drafts_are_read_from_whole_blocks(tmp_path):
    config = resolve(tmp_path, DSPARK, method="dspark", num_speculative_tokens=2)
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (2, 6)


@pytest.mark.parametrize("samples_from_anchor", [True, False])
def test_blocks_are_short_where_the_drafter_allows_it(tmp_path, samples_from_anchor):
    keys = {"allows_short_blocks": True, "sample_from_anchor": samples_from_anchor}
    num_silent = 0 if samples_from_anchor else 1
    config = resolve(tmp_path, DSPARK | keys, method="dspark", num_speculative_tokens=2)
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (
        2,
        2 + num_silent,
    )
    assert config.dspark_config.num_draft_tokens == 2
    whole = resolve(tmp_path, DSPARK | keys, method="dspark")
    assert (whole.num_speculative_tokens, whole.num_lookahead_tokens) == (
        6 - num_silent,
        6,
    )


def test_trap_3_more_drafts_than_a_block_gives_are_refused(tmp_path):
    message = f"num_speculative_tokens must be at most 6, .* {tmp_path} gives, got 7"
    with pytest.raises(VLLMValidationError, match=message):
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
    with pytest.raises(VLLMValidationError, match="its method is dspark, not dflash"):
        resolve(tmp_path, DSPARK, method="dflash")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
    ],
)
def test_other_drafters_are_refused_by_name(tmp_path, raw, message):
    with pytest.raises(VLLMValidationError, match=message):
        resolve(tmp_path, raw)


@pytest.mark.parametrize("raw", [DSPARK, TARGET])
def test_a_drafter_of_another_target_is_refused_with_both_sides(tmp_path, raw):
    keys = {"num_speculative_tokens": 2}
    with pytest.raises(VLLMValidationError) as info:
        resolve(tmp_path, raw | {"vocab_size": 104}, **keys)
    assert info.value.parameter == "speculative_config.model"
    for part in (f"{tmp_path} for the model target", "104", "100"):
        assert part in str(info.value)


@pytest.mark.parametrize("method", ["dspark", "draft_model", None])
def test_a_drafter_that_is_not_there_is_refused_with_both_sides(tmp_path, method):
    values = {"method": method, "model": "/nowhere", "num_speculative_tokens": 2}
    message = "speculative_config.model /nowhere for the model target: .*no such file"
    with pytest.raises(VLLMValidationError, match=message):
        resolve_speculative_config(values, target())
    empty = str(tmp_path)
    with pytest.raises(VLLMValidationError, match=f"{empty}.* config.json"):
        resolve_speculative_config(values | {"model": empty}, target())


@pytest.mark.parametrize("raw", [DSPARK, TARGET])
def test_a_drafter_without_weights_is_refused_before_the_start(tmp_path, raw):
    folder = write(tmp_path, raw)
    (tmp_path / "model.safetensors").unlink()
    values = {"model": folder, "num_speculative_tokens": 2}
    with pytest.raises(VLLMValidationError, match="there is no model.safetensors"):
        resolve_speculative_config(values, target())


def test_draft_positions_are_the_least_that_anybody_has(tmp_path):
    assert resolve(tmp_path, DSPARK).max_model_len == 48
    assert resolve(tmp_path, DSPARK, max_model_len=64).max_model_len == 64
    short = DSPARK | {"max_position_embeddings": 40}
    assert resolve(tmp_path, short).max_model_len == 40
    message = "6 tokens, more than the 5 positions"
    with pytest.raises(VLLMValidationError, match=message):
        resolve(tmp_path, DSPARK, max_model_len=5)


@pytest.mark.parametrize("method", ["dflash", "draft_model"])
def test_a_drafter_that_no_model_has_for_itself_must_be_named(method):
    with pytest.raises(VLLMValidationError, match="must name the drafter"):
        check_speculative_config({"method": method, "num_speculative_tokens": 2})


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


def test_all_drafts_are_verified_unless_fewer_are_asked_for():
    config = resolve_speculative_config(NGRAM, target())
    assert not config.enable_adaptive_verification
    keys = NGRAM | {"enable_adaptive_verification": True}
    assert resolve_speculative_config(keys, target()).enable_adaptive_verification


def test_the_drafter_of_a_model_with_its_own_is_verified_adaptively(own):
    assert resolve_speculative_config("auto", own).enable_adaptive_verification
    for keys, is_adaptive in (
        ({"num_speculative_tokens": 3}, True),
        ({"enable_adaptive_verification": False}, False),
        (NGRAM, False),
    ):
        config = resolve_speculative_config(keys, own)
        assert config.enable_adaptive_verification == is_adaptive


ADAPTIVE = NGRAM | {"enable_adaptive_verification": True}
COSTS = {"draft_curve": [[1, 2]], "verify_curve": [[1, 20], [4, 21]]}


def test_a_cost_table_is_read_when_the_engine_is_configured(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    config = resolve_speculative_config(ADAPTIVE | {"cost_table": str(path)}, target())
    assert config.cost_profile.verify_curve == ((1, 20.0), (4, 21.0))
    assert resolve_speculative_config(ADAPTIVE, target()).cost_profile is None


@pytest.mark.parametrize(
    ("keys", "document", "message"),
    [
        (ADAPTIVE, COSTS | {"draft_curve": []}, "draft_curve must be a list"),
        (ADAPTIVE, None, "cannot be read"),
        (NGRAM, COSTS, "needs enable_adaptive_verification to be true"),
        (
            NGRAM | {"enable_adaptive_verification": False},
            COSTS,
            "needs enable_adaptive_verification to be true",
        ),
    ],
)
def test_a_cost_table_that_is_none_or_would_be_unread_is_refused(
    tmp_path, keys, document, message
):
    path = tmp_path / "costs.json"
    if document is not None:
        path.write_text(json.dumps(document))
    with pytest.raises(VLLMValidationError, match=message) as info:
        resolve_speculative_config(keys | {"cost_table": str(path)}, target())
    assert info.value.parameter == "speculative_config.cost_table"
    # Nothing but the message is seen on a command line.
    assert "speculative_config.cost_table" in str(info.value)


SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({}, "method"),
        (NGRAM | {"method": "ngarm"}, "method"),
        (NGRAM | {"method": ["ngram"]}, "method"),
        (NGRAM | {"lookup_max": 3}, "lookup_max"),
        (NGRAM | {1: 2}, "1"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": 65}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": "2"}, "num_speculative_tokens"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ({"draft_sample_method": "best"}, "draft_sample_method"),
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
        (NGRAM | {"enable_adaptive_verification": 1}, "enable_adaptive_verification"),
        (
            NGRAM | {"enable_adaptive_verification": "true"},
            "enable_adaptive_verification",
        ),
        (NGRAM | {"cost_table": 5}, "cost_table"),
        (NGRAM | {"cost_table": ""}, "cost_table"),
        (NGRAM | {"cost_table": "a\0b"}, "cost_table"),
        ({"model": "", "num_speculative_tokens": 2}, "model"),
        ({"model": 5, "num_speculative_tokens": 2}, "model"),
        ({"model": "a\0b", "num_speculative_tokens": 2}, "model"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_key(values, parameter):
    with pytest.raises(VLLMValidationError) as info:
        check_speculative_config(values)
    assert info.value.parameter == f"speculative_config.{parameter}"
    assert f"speculative_config.{parameter}" in str(info.value)


@pytest.fixture
def own(embed, tmp_path):
    """Give the target a drafter of its own, as the embedded model has."""
    model = tmp_path / "target"
    write(model, TARGET)
    embed(model, write(tmp_path / "drafter", DSPARK))
    return target(model=str(model))


def test_a_model_with_a_drafter_of_its_own_uses_it_by_default(own, tmp_path):
    config = resolve_speculative_config("auto", own)
    assert config == resolve_speculative_config({"method": "dspark"}, own)
    assert (config.method, config.num_speculative_tokens) == ("dspark", 6)
    assert config.model == str(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_speculative_tokens": 3}, ("dspark", 3, "probabilistic")),
        ({"draft_sample_method": "greedy"}, ("dspark", 6, "greedy")),
        ({"method": "dspark", "max_model_len": 40}, ("dspark", 6, "probabilistic")),
        (NGRAM, ("ngram", 2, "greedy")),
    ],
)
def test_what_a_user_sets_of_a_models_own_drafter_stands(own, values, expected):
    config = resolve_speculative_config(values, own)
    method = config.method, config.num_speculative_tokens, config.draft_sample_method
    assert method == expected


def test_a_drafter_that_is_named_drafts_greedily_unless_told_otherwise(own, tmp_path):
    named = {"model": str(tmp_path / "drafter")}
    config = resolve_speculative_config(named, own)
    assert config.draft_sample_method == "greedy"
    assert not config.has_draft_distributions


def test_null_is_no_speculation_whatever_the_model_has(own):
    assert resolve_speculative_config(None, own) is None


def test_any_other_model_has_no_drafts_by_default(own):
    assert resolve_speculative_config("auto", target()) is None


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(
        speculative_args.logger,
        "warning",
        lambda text, *args: lines.append(text % args),
    )
    return lines


def test_a_context_shorter_than_a_block_has_no_drafts_by_default(own, warnings):
    short = target(max_model_len=5, model=own.model)
    assert resolve_speculative_config("auto", short) is None
    [line] = warnings
    assert "blocks have 6 tokens, more than max_model_len 5" in line
    with pytest.raises(VLLMValidationError, match="raise max_model_len"):
        resolve_speculative_config({"method": "dspark"}, short)


def test_a_context_needs_to_hold_only_the_block_that_is_run(embed, tmp_path, warnings):
    model = write(tmp_path / "target", TARGET)
    config = replace(
        parse_dspark_config(DSPARK, "config.json"),
        num_proposed_tokens=3,
        allows_short_blocks=True,
    )
    raw = to_speculators_json(config, "target", "LlamaForCausalLM")
    embed(tmp_path / "target", write(tmp_path / "drafter", raw))
    short = target(max_model_len=3, model=model)
    config = resolve_speculative_config("auto", short)
    assert (config.num_speculative_tokens, config.num_lookahead_tokens) == (3, 3)
    assert warnings == []
    shorter = target(max_model_len=2, model=model)
    assert resolve_speculative_config("auto", shorter) is None
    assert "blocks have 3 tokens, more than max_model_len 2" in warnings[0]


def test_a_package_without_the_drafter_says_so(embed, tmp_path, warnings):
    folder = write(tmp_path / "target", TARGET)
    embed(folder, tmp_path / "nothing")
    bare = target(model=folder)
    assert resolve_speculative_config("auto", bare) is None
    [line] = warnings
    assert "No speculative decoding: this copy of vllm was made without" in line
    with pytest.raises(VLLMValidationError, match="made without the drafter of Smol"):
        resolve_speculative_config({"method": "dspark"}, bare)


@pytest.mark.parametrize("values", ["auto", {"method": "dspark"}])
def test_a_damaged_drafter_of_the_models_own_is_never_left_aside(own, tmp_path, values):
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        resolve_speculative_config(values, own)
    assert resolve_speculative_config(None, own) is None
    assert resolve_speculative_config(NGRAM, own).method == "ngram"


def test_a_drafter_of_the_models_own_that_does_not_fit_is_refused(own, tmp_path):
    write(tmp_path / "drafter", DSPARK | {"vocab_size": 104})
    with pytest.raises(UnsupportedError, match="has 104, the target 100"):
        resolve_speculative_config("auto", own)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"method": "dspark"}, "name the drafter: "),
        ({"num_speculative_tokens": 2}, "name the drafter, or set method to ngram: "),
    ],
)
def test_a_model_without_a_drafter_needs_one_to_be_named(tmp_path, values, remedy):
    folder = write(tmp_path, TARGET)
    with pytest.raises(VLLMValidationError) as info:
        resolve_speculative_config(values, target(model=folder))
    assert info.value.parameter == "speculative_config.model"
    message = str(info.value)
    assert f"speculative_config.model must {remedy}{folder} has none" in message
    assert "it is not the embedded SmolLM2-135M-Instruct" in message
    assert "draft layers" not in message


def test_draft_layers_inside_a_targets_own_files_are_refused_by_name(tmp_path):
    folder = write(tmp_path, TARGET | {"dspark_block_size": 5})
    message = r"draft layers in the model's own files \(dspark_block_size\)"
    with pytest.raises(VLLMValidationError, match=message):
        resolve_speculative_config({"method": "dspark"}, target(model=folder))


def test_a_drafter_that_is_served_is_the_models_own(tmp_path):
    folder = write(tmp_path, DSPARK)
    config = resolve_speculative_config("auto", target(), folder)
    assert (config.model, config.draft_sample_method) == (folder, "probabilistic")
    assert resolve_speculative_config(None, target(), folder) is None


def test_a_word_that_is_none_is_refused():
    with pytest.raises(VLLMValidationError, match="must be auto, null or a mapping"):
        check_speculative_config("on")


def test_who_drafts_and_how_to_do_without_is_one_line(own, tmp_path):
    config = resolve_speculative_config("auto", own)
    assert describe_speculation(config) == (
        "Speculative decoding: dspark drafts up to 6 tokens a step from "
        f"{tmp_path}/drafter; --speculative-config null turns it off"
    )
    ngram = resolve_speculative_config(NGRAM, own)
    assert "ngram drafts up to 2 tokens a step; " in describe_speculation(ngram)
