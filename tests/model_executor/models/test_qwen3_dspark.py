from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.markers import bit_for_bit
from tests.model_executor.dspark_harness import (
    MASK,
    Block,
    DraftSession,
    load_drafter,
    make_config,
    make_drafter,
    make_target,
    save_and_load,
    step_logits,
    target_taps,
)
from tests.model_executor.harness import BLOCK_SIZE, load
from vllm._cpu_ops_torch import _cache_views
from vllm.model_executor.layers.embedding import VocabEmbedding
from vllm.speculator_training.modeling import DSparkTrainingModel
from vllm.transformers_utils.configs.dspark import DSparkConfig

TOKENS = [1, 17, 5, 90, 33, 33, 8, 2, 64, 71, 12, 94, 0, 44, 21, 7, 50, 3, 81, 29]
BLOCK = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def config():
    return make_config()


@pytest.fixture(scope="module")
def reference(config, target):
    return make_drafter(config, target)


@pytest.fixture(scope="module")
def drafter(reference, target, tmp_path_factory):
    return save_and_load(tmp_path_factory.mktemp("drafter"), reference, target)


@pytest.fixture(scope="module")
def taps(target, config):
    return target_taps(target, config, TOKENS)


def masked_forward(
    reference: DSparkTrainingModel, taps: list[torch.Tensor], anchors: list[int]
) -> torch.Tensor:
    """Return [B, K, hidden_size] of blocks at these positions, by the training form."""
    positions = torch.tensor(anchors)[:, None] + torch.arange(BLOCK)
    input_ids = torch.full_like(positions, MASK)
    input_ids[:, 0] = torch.tensor([TOKENS[p] for p in anchors])
    with torch.no_grad():
        return reference(torch.cat(taps, -1)[None], input_ids[None], positions[None])[0]


def block_at(position: int, req: int = 0) -> Block:
    return Block(req, TOKENS[position], position)


@pytest.mark.parametrize("kind", ["Qwen3DSparkModel", "LlamaDSparkModel"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_states_over_a_growing_cache_equal_the_masked_training_forward(
    kind, bias, target, tmp_path
):
    config = make_config(architectures=[kind], attention_bias=bias)
    reference = make_drafter(config, target)
    drafter = save_and_load(tmp_path, reference, target)
    taps = target_taps(target, config, TOKENS)
    anchors = [0, 1, 5, 6, 11, 17]
    expected = masked_forward(reference, taps, anchors)
    session, start = DraftSession(drafter), 0
    for anchor, states in zip(anchors, expected, strict=True):
        if anchor:
            session.write(taps, start, anchor)
        start = anchor
        actual = session.draft(block_at(anchor))[0]
        torch.testing.assert_close(actual, states, rtol=1e-5, atol=1e-5)


def test_context_written_in_rounds_equals_context_written_at_once(drafter, taps):
    at_once, in_rounds = DraftSession(drafter), DraftSession(drafter)
    at_once.write(taps, 0, 18)
    for start, end in [(0, 7), (7, 8), (8, 13), (13, 18)]:
        in_rounds.write(taps, start, end)
    for name, cache in at_once.kv_caches.items():
        torch.testing.assert_close(in_rounds.kv_caches[name], cache, rtol=0, atol=1e-5)
        assert cache.abs().max() > 0.1


def test_requests_of_one_pass_do_not_see_each_other(drafter, reference, taps):
    session = DraftSession(drafter, num_reqs=3)
    positions = [17, 2, 9]
    for req, position in enumerate(positions):
        session.write(taps, 0, position, req)
    blocks = [block_at(position, req) for req, position in enumerate(positions)]
    actual = session.draft(*blocks)
    expected = masked_forward(reference, taps, positions)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_last_slot_is_seen_by_the_first(drafter, taps):
    session = DraftSession(drafter)
    session.write(taps, 0, 9)
    input_ids = torch.tensor([TOKENS[9], MASK, MASK, MASK])
    slots = [torch.arange(9, 9 + BLOCK)]
    usual = session.run(input_ids, slots, [0])
    input_ids[-1] = 7
    assert (session.run(input_ids, slots, [0])[0, 0] - usual[0, 0]).abs().max() > 1e-3


def test_target_states_at_or_after_the_anchor_are_not_seen(reference, taps):
    usual = masked_forward(reference, taps, [9])
    later = [tap.clone() for tap in taps]
    for tap in later:
        tap[9:] = 100.0
    assert torch.equal(masked_forward(reference, later, [9]), usual)
    for tap in later:
        tap[8] = 100.0
    assert not torch.equal(masked_forward(reference, later, [9]), usual)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False], ids=["e", "no-e"])
def test_teacher_forced_logits_equal_those_of_single_steps(
    head_type, with_markov, target, tmp_path
):
    config = make_config(
        markov_head_type=head_type, confidence_head_with_markov=with_markov
    )
    reference = make_drafter(config, target)
    drafter = save_and_load(tmp_path, reference, target)
    torch.manual_seed(0)
    hidden, predecessors = torch.randn(3, BLOCK, 64), torch.randint(0, 96, (3, BLOCK))
    with torch.no_grad():
        logits, confidence = step_logits(drafter, hidden, predecessors)
        expected = reference.compute_logits(hidden, predecessors)
        expected_confidence = reference.compute_confidence(hidden, predecessors)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(confidence, expected_confidence, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_bias_of_a_draft_by_hand(head_type, target, tmp_path):
    config = make_config(markov_head_type=head_type, markov_rank=8)
    reference = make_drafter(config, target)
    drafter = save_and_load(tmp_path, reference, target)
    weights = reference.state_dict()
    e, h = weights["markov_head.markov_w1.weight"][[5]], torch.randn(1, 64)
    state = torch.full((1, 8), 0.5) if head_type == "rnn" else None
    with torch.no_grad():
        bias, next_state = drafter.markov_bias(e, h, state)
    if head_type == "gated":
        x = torch.cat((h, e), -1) @ weights["markov_head.gate_proj.weight"].T
        e = torch.sigmoid(x + weights["markov_head.gate_proj.bias"]) * e
    elif head_type == "rnn":
        x = torch.cat((state, e, h), -1) @ weights["markov_head.joint_proj.weight"].T
        x = x + weights["markov_head.joint_proj.bias"]
        gate, e = torch.sigmoid(x[:, :8]), torch.tanh(x[:, 16:])
        expected_state = gate * state + (1 - gate) * torch.tanh(x[:, 8:16])
        torch.testing.assert_close(next_state, expected_state, rtol=1e-4, atol=1e-5)
    expected = e @ weights["markov_head.markov_w2.weight"].T
    torch.testing.assert_close(bias, expected, rtol=1e-4, atol=1e-5)


def test_a_walk_never_chooses_nan(target, tmp_path):
    config = make_config(markov_head_type="vanilla", markov_rank=8)
    drafter = save_and_load(tmp_path, make_drafter(config, target), target)
    logits = torch.full((2, 1, config.draft_vocab_size), -100.0)
    logits[0, 0, 3], logits[0, 0, 7] = 100.0, float("nan")
    logits[1] = float("nan")
    with torch.no_grad():
        ids, _ = drafter.markov_head.walk(logits, torch.tensor([5]), None)
    assert ids.tolist() == [[3, 0]]


def test_confidence_is_divided_by_the_temperature_of_its_position(target, tmp_path):
    plain = make_drafter(make_config(), target)
    hidden, e = torch.randn(2, BLOCK, 64), torch.randn(2, BLOCK, 8)
    logits = save_and_load(tmp_path / "a", plain, target).compute_confidence(hidden, e)
    temperatures = [0.5, 1.0, 2.0, 4.0]
    config = make_config(confidence_temperatures=temperatures)
    calibrated = save_and_load(tmp_path / "b", make_drafter(config, target), target)
    actual = calibrated.compute_confidence(hidden, e)
    torch.testing.assert_close(actual, logits / torch.tensor(temperatures))


def test_a_net_without_heads_has_neither_bias_nor_confidence(target, tmp_path):
    config = make_config(
        markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False
    )
    drafter = save_and_load(tmp_path, make_drafter(config, target), target)
    hidden = torch.randn(1, BLOCK, 64)
    logits, confidence = step_logits(drafter, hidden, torch.zeros(1, BLOCK).long())
    assert confidence is None
    torch.testing.assert_close(logits[0], drafter.compute_base_logits(hidden[0]))


def test_trap_2_a_block_that_predicts_from_its_own_slots_gives_one_draft_fewer(
    target, taps, tmp_path
):
    states = {}
    for samples in (True, False):
        config = make_config(sample_from_anchor=samples)
        folder = tmp_path / str(samples)
        drafter = save_and_load(folder, make_drafter(config, target), target)
        session = DraftSession(drafter)
        session.write(taps, 0, 9)
        states[samples] = session.draft(block_at(9))
    assert states[True].shape == (1, 4, 64)
    assert torch.equal(states[False], states[True][:, 1:])


def test_trap_3_a_block_shorter_than_it_was_trained_is_not_run(drafter):
    session = DraftSession(drafter)
    with pytest.raises(AssertionError, match="verify less instead"):
        session.run(torch.tensor([1, MASK, MASK]), [torch.arange(3)], [0])


def test_trap_4_weights_for_interleaved_rotation_are_reordered(
    drafter, reference, target, taps, tmp_path
):
    save_and_load(tmp_path, reference, target)
    path = tmp_path / "model.safetensors"
    # Cloned: what is loaded is a view of the file that is written over below.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    # From halves (a0 a1 .. b0 b1 ..) to pairs (a0 b0 a1 b1 ..).
    order = torch.arange(32).view(2, 16).T.flatten()
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.view(-1, 32, tensor.shape[-1])
            tensors[name] = heads[:, order].reshape(tensor.shape)
        elif "q_norm" in name or "k_norm" in name:
            tensors[name] = tensor[order]
    save_file(tensors, path)

    def states_of(model):
        session = DraftSession(model)
        session.write(taps, 0, 9)
        return session.draft(block_at(9))

    assert (states_of(load_drafter(tmp_path, target)) - states_of(drafter)).max() > 0.1
    config = (tmp_path / "config.json").read_text()
    flagged = config.replace('"head_dim"', '"rope_interleave": true, "head_dim"')
    (tmp_path / "config.json").write_text(flagged)
    actual = states_of(load_drafter(tmp_path, target))
    torch.testing.assert_close(actual, states_of(drafter), rtol=1e-5, atol=1e-5)


def test_trap_5_a_pass_writes_the_reserved_slots_and_no_others(drafter, config, taps):
    session = DraftSession(drafter)
    session.write(taps, 0, 9)
    before = {name: cache.clone() for name, cache in session.kv_caches.items()}
    session.draft(block_at(9))
    for name, cache in session.kv_caches.items():
        # Values are seen as [block, kv head, offset, ...] or [block, offset, ...].
        is_cpu_cache = cache.shape[3] == BLOCK_SIZE
        values, values_before = (
            _cache_views(x)[1] if is_cpu_cache else x[1] for x in (cache, before[name])
        )
        changed = (values != values_before).nonzero()
        axis = 2 if is_cpu_cache else 1
        slots = changed[:, 0] * BLOCK_SIZE + changed[:, axis]
        first = BLOCK_SIZE + 9
        expected = range(first, first + config.num_lookahead_slots)
        assert slots.unique().tolist() == list(expected)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_layer_of_a_reduced_vocabulary_is_a_part_of_the_targets(
    tmp_path, is_tied
):
    target = make_target(tmp_path, tie_word_embeddings=is_tied)
    assert target.lm_head.is_tied == is_tied
    ids = torch.tensor([0, 3, 4, 40, 95])
    config = make_reduced(5)
    reference = make_drafter(config, target, ids)
    drafter = save_and_load(tmp_path / "drafter", reference, target, ids)
    assert drafter.draft_vocab.map_ids(torch.tensor([[4, 1]])).tolist() == [[95, 3]]
    # To the bit.
    units = torch.eye(64)
    assert torch.equal(drafter.lm_head(units), target.lm_head(units)[:, ids])


def make_reduced(draft_vocab_size: int) -> DSparkConfig:
    return replace(make_config(), draft_vocab_size=draft_vocab_size)


def test_trap_10_logits_of_a_half_precision_drafter_are_float32(
    reference, tmp_path_factory, tmp_path
):
    folder = tmp_path_factory.mktemp("half")
    make_target(folder)
    half = load(str(folder), dtype="bfloat16")
    drafter = save_and_load(tmp_path, reference, half)
    hidden = torch.randn(1, BLOCK, 64).bfloat16()
    logits, confidence = step_logits(drafter, hidden, torch.zeros(1, BLOCK).long())
    assert logits.dtype is torch.float32
    assert confidence.dtype is torch.float32
    # The sum is not rounded to eight bits again before it is drawn from.
    assert not torch.equal(logits, logits.bfloat16().float())


def test_trap_11_context_is_rotated_by_its_absolute_positions(drafter, reference, taps):
    session = DraftSession(drafter)
    session.write(taps, 0, 9)
    right = session.draft(block_at(9))
    expected = masked_forward(reference, taps, [9])
    torch.testing.assert_close(right, expected, rtol=1e-5, atol=1e-5)
    # As if two tokens before them had been counted twice.
    session.write(taps, 0, 9, position_shift=2)
    assert (session.draft(block_at(9)) - right).abs().max() > 1e-2


def test_trap_12_draft_caches_have_names_of_their_own(drafter, target):
    own = drafter.get_kv_cache_specs(16, torch.float32)
    assert list(own) == [f"draft.layers.{i}.self_attn.attn" for i in range(2)]
    assert not own.keys() & target.get_kv_cache_specs(16, torch.float32).keys()


@bit_for_bit
def test_trap_12_a_blocks_keys_are_scratch(drafter, taps):
    clean, used = DraftSession(drafter), DraftSession(drafter)
    clean.write(taps, 0, 13)
    used.write(taps, 0, 9)
    used.draft(block_at(9))
    used.write(taps, 9, 13)
    assert torch.equal(used.draft(block_at(13)), clean.draft(block_at(13)))


def test_confidence_never_reads_the_draft_that_it_judges(drafter):
    hidden, predecessors = torch.randn(1, BLOCK, 64), torch.tensor([[4, 5, 6, 7]])
    _, usual = step_logits(drafter, hidden, predecessors)
    predecessors[0, 2] = 50
    _, changed = step_logits(drafter, hidden, predecessors)
    # The second draft is the third one's predecessor.
    assert (changed != usual).tolist() == [[False, False, True, False]]


def test_embedding_of_the_target_is_shared_and_not_copied(drafter, target):
    assert drafter.embed_tokens is target.model.embed_tokens
    assert drafter.lm_head is target.lm_head
    assert isinstance(drafter.embed_tokens, VocabEmbedding)
