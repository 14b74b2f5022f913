"""Drafters beside a quantised target: what is rounded, and what it changes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.markers import bit_for_bit, needs_cpu_ops
from tests.model_executor.dspark_harness import (
    Block,
    DraftSession,
    load_drafter,
    make_config,
    make_drafter,
    save_and_load,
    target_taps,
    write_deepspec_config,
)
from tests.model_executor.harness import load
from tests.model_executor.harness import make_config as make_engine_config
from tests.model_executor.hf_reference import tiny_model, write_gguf
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.quantization.methods import (
    UNQUANTIZED,
    QuantizationMethod,
    get_drafter_quantization_method,
)
from vllm.model_executor.layers.quantization.weights import (
    DenseWeight,
    PackedWeight,
    QuantizedWeight,
    round_to_blocks,
)
from vllm.model_executor.model_loader import find_drafter_quantization, load_model
from vllm.model_executor.models.qwen3_dspark import DSparkModel

CPU = torch.device("cpu")
TOKENS = [1, 17, 5, 90, 33, 33, 8, 2, 64, 71, 12, 94]
DRAFTED = torch.arange(20, 90)


def method_for(
    quantization: str,
    is_target_gguf: bool = True,
    is_gguf: bool = False,
    dtype: torch.dtype = torch.float32,
) -> QuantizationMethod:
    return get_drafter_quantization_method(
        quantization, is_target_gguf, is_gguf, CPU, dtype
    )


ROUNDED = method_for("gguf")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("target") / "tiny.gguf")
    model = tiny_model("qwen3", num_hidden_layers=4)
    write_gguf(path, model, "qwen3", "Q8_0", types={"output": "Q4_0"})
    return load(path, quantization="gguf")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """Return the directory of a drafter of a part of the vocabulary."""
    path = tmp_path_factory.mktemp("drafter")
    config = replace(make_config(markov_rank=32), draft_vocab_size=len(DRAFTED))
    drafter = make_drafter(config, target, DRAFTED)
    save_and_load(path, drafter, target, DRAFTED)
    return path


def quant_type_of(weight: PackedWeight) -> str:
    assert isinstance(weight, QuantizedWeight)
    return weight.quant_type


def kinds(model: nn.Module) -> set[type]:
    """Return those of all matrices but the confidence head's, which has one row."""
    matrices = [m for m in model.modules() if isinstance(m, Linear)]
    return {type(m.packed) for m in matrices if m.out_features > 1}


@pytest.mark.parametrize(
    ("quant_type", "num_steps", "relative"), [("Q8_0", 254, 0.006), ("Q4_1", 15, 0.09)]
)
def test_a_rounded_number_is_off_by_half_a_step_at_most(
    quant_type, num_steps, relative
):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 96, generator=generator)
    weight *= torch.logspace(-2, 3, 70).unsqueeze(1)
    weight[3, 32:64], weight[4, :32] = 0.0, 2.5
    rounded = round_to_blocks(weight, quant_type)
    assert isinstance(rounded, QuantizedWeight)
    blocks = weight.unflatten(1, (3, 32))
    values = rounded.unpack().unflatten(1, (3, 32))
    assert not values[3, 1].any()
    largest = blocks.abs().amax(-1, keepdim=True)
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    span = 2 * largest if quant_type == "Q8_0" else high - low
    # What is stored in half precision has 11 bits.
    bound = 0.5 * span / num_steps + 2**-10 * largest
    error = (values - blocks).abs()
    assert (error <= bound).all()
    assert error.square().mean().sqrt() < relative * weight.square().mean().sqrt()


def test_numbers_that_are_in_blocks_already_stay_as_they_are():
    once = round_to_blocks(torch.randn(40, 64)).unpack()
    assert torch.equal(round_to_blocks(once).unpack(), once)


def test_rows_that_are_no_whole_blocks_stay_numbers():
    weight = torch.randn(5, 40)
    kept = round_to_blocks(weight)
    assert isinstance(kept, DenseWeight)
    assert torch.equal(kept.unpack(), weight)


def test_a_drafter_is_rounded_where_its_target_is_quantised():
    assert method_for("none") is UNQUANTIZED
    assert method_for("none", is_gguf=True) is UNQUANTIZED
    for quantization in ("gguf", "int8"):
        for is_gguf in (False, True):
            method = method_for(quantization, is_gguf=is_gguf)
            assert method.keeps_blocks
            assert method.pack is round_to_blocks
            assert quant_type_of(method.coarse.pack(torch.randn(4, 32))) == "Q4_1"
    of_auto = round_to_blocks if ops.has_cpu_ops() else DenseWeight
    assert method_for("auto").pack is of_auto
    assert method_for("auto", is_target_gguf=False) is UNQUANTIZED
    # A drafter's own blocks are kept beside a target in float.
    kept = method_for("auto", is_target_gguf=False, is_gguf=True)
    assert kept.keeps_blocks == ops.has_cpu_ops()
    assert method_for("auto", dtype=torch.bfloat16) is UNQUANTIZED
    assert isinstance(UNQUANTIZED.coarse.pack(torch.randn(4, 32)), DenseWeight)


def test_a_drafter_in_floats_is_what_it_was(folder, target):
    drafter = load_drafter(folder, target)
    head = drafter.lm_head.packed
    assert kinds(drafter) == {DenseWeight, QuantizedWeight}
    drafter.lm_head = None
    assert kinds(drafter) == {DenseWeight}
    assert torch.equal(head.unpack(), target.lm_head.unpack()[DRAFTED])


def test_matrices_are_rounded_and_the_lent_head_stays_as_it_is(folder, target):
    plain, rounded = load_drafter(folder, target), load_drafter(folder, target, ROUNDED)
    assert kinds(rounded) == {QuantizedWeight}
    matrices = {n: m for n, m in plain.named_modules() if isinstance(m, Linear)}
    for name, layer in rounded.named_modules():
        if isinstance(layer, Linear):
            weight = matrices[name].unpack()
            assert torch.equal(layer.unpack(), _rounded(name, weight)), name
    selected = target.lm_head.packed.select(DRAFTED)
    # The four bits of the file, not eight.
    assert rounded.lm_head.packed._packed.numel() == selected._packed.numel()


def _rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    if name in ("lm_head", "confidence_head.proj"):
        return weight
    return round_to_blocks(weight, "Q4_1" if ".mlp." in name else "Q8_0").unpack()


@pytest.mark.parametrize("pack", [round_to_blocks, QuantizedWeight.from_float])
def test_copied_rows_of_eight_bits_are_narrowed(pack):
    head = Linear(64, {"lm_head": 96}, bias=False, dtype=torch.float32)
    head.weight_slots()["lm_head.weight"].copy_(torch.randn(96, 64))
    head.process_weights_after_loading(QuantizationMethod(False, pack))
    exact = head.unpack()[DRAFTED]
    assert torch.equal(head.select(DRAFTED).unpack(), exact)
    copied = head.select(DRAFTED, ROUNDED)
    assert quant_type_of(copied.packed) == "Q4_1"
    assert torch.equal(copied.unpack(), round_to_blocks(exact, "Q4_1").unpack())


# With four bits for the MLPs, and with eight for all.
@pytest.mark.parametrize(
    ("method", "bound"),
    [(ROUNDED, 0.25), (QuantizationMethod(True, round_to_blocks), 0.05)],
    ids=["Q4_1", "Q8_0"],
)
@pytest.mark.parametrize("kind", ["Qwen3DSparkModel", "LlamaDSparkModel"])
def test_rounding_moves_the_states_of_a_block_a_little(
    kind, method, bound, target, tmp_path
):
    config = make_config(architectures=[kind], markov_rank=32)
    plain = save_and_load(tmp_path, make_drafter(config, target), target)
    rounded = load_drafter(tmp_path, target, method)
    assert rounded.lm_head is target.lm_head
    taps = target_taps(target, config, TOKENS)
    states = []
    for drafter in (plain, rounded):
        session = DraftSession(drafter)
        session.write(taps, 0, 9)
        states.append(session.draft(Block(0, TOKENS[9], 9)))
    error = (states[1] - states[0]).square().mean().sqrt()
    assert 0 < error < bound * states[0].square().mean().sqrt()


def test_both_forms_of_a_config_give_the_same_rounded_drafter(target, tmp_path):
    model = make_drafter(make_config(markov_rank=32), target)
    of_speculators = save_and_load(tmp_path, model, target, method=ROUNDED)
    write_deepspec_config(tmp_path)
    of_deepspec = load_drafter(tmp_path, target, ROUNDED)
    assert kinds(of_speculators) == kinds(of_deepspec) == {QuantizedWeight}
    taps = [torch.randn(2, 64) for _ in range(3)]
    assert torch.equal(
        of_speculators.combine_hidden_states(taps),
        of_deepspec.combine_hidden_states(taps),
    )


@bit_for_bit
def test_a_rounded_drafters_bits_do_not_depend_on_the_batch(folder, target):
    drafter = load_drafter(folder, target, ROUNDED)
    taps = target_taps(target, drafter.config, TOKENS)
    positions = [11, 2, 7]
    blocks = [Block(i, TOKENS[p], p) for i, p in enumerate(positions)]
    together = DraftSession(drafter, num_reqs=3)
    for req, position in enumerate(positions):
        together.write(taps, 0, position, req)
    states = together.draft(*blocks)
    drafts = walk(drafter, states, blocks)
    for index, block in enumerate(blocks):
        alone = DraftSession(drafter)
        for position in range(block.position):
            alone.write(taps, position, position + 1)
        state = alone.draft(replace(block, req=0))
        assert torch.equal(state[0], states[index])
        for one, all_of_them in zip(walk(drafter, state, [block]), drafts, strict=True):
            assert torch.equal(one[0], all_of_them[index])


@pytest.mark.parametrize("method", [UNQUANTIZED, ROUNDED], ids=["float", "rounded"])
@pytest.mark.parametrize("is_reduced", [False, True], ids=["all", "reduced"])
def test_a_walk_drafts_what_single_steps_draft(method, is_reduced, target, tmp_path):
    token_ids = DRAFTED if is_reduced else None
    config = make_config(markov_rank=32)
    if is_reduced:
        config = replace(config, draft_vocab_size=len(DRAFTED))
    model = make_drafter(config, target, token_ids)
    drafter = save_and_load(tmp_path, model, target, token_ids, method)
    states = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    blocks = [Block(0, anchor_id, 0) for anchor_id in (5, 0, 95)]
    actual, embedded, _ = walk(drafter, states, blocks)
    previous = torch.tensor([block.anchor_id for block in blocks])
    for step in range(4):
        embedding = drafter.markov_embed(previous)
        bias, _ = drafter.markov_bias(embedding, states[:, step], None)
        best = (drafter.compute_base_logits(states[:, step]) + bias).argmax(dim=-1)
        previous = best if token_ids is None else token_ids[best]
        assert actual[:, step].tolist() == previous.tolist()
        assert torch.equal(embedded[:, step], embedding)


@needs_cpu_ops
@pytest.mark.parametrize("kind", ["Qwen3DSparkModel", "LlamaDSparkModel"])
@pytest.mark.parametrize("is_reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("method", [UNQUANTIZED, ROUNDED], ids=["float32", "rounded"])
def test_one_operation_drafts_what_many_draft(
    target, tmp_path, kind, is_reduced, method
):
    token_ids = DRAFTED if is_reduced else None
    temperatures = [0.7, 1.0, 1.3, 2.0]
    config = make_config(
        architectures=[kind], markov_rank=32, confidence_temperatures=temperatures
    )
    if is_reduced:
        config = replace(config, draft_vocab_size=len(DRAFTED))
    model = make_drafter(config, target, token_ids)
    drafter = save_and_load(tmp_path, model, target, token_ids, method)
    taps = target_taps(target, config, list(range(30)))
    session = DraftSession(drafter, num_reqs=3)
    blocks = [Block(0, 5, 9), Block(1, 0, 30), Block(2, 95, 1)]
    for block in blocks:
        session.write(taps, 0, block.position, block.req)
    num_drafts = torch.tensor([4, 2, 0], dtype=torch.int32)
    drafts, scores = session.maybe_draft(*blocks, num_drafts=num_drafts)
    expected, _, confidence = walk(drafter, session.draft(*blocks), blocks)
    expected[torch.arange(4) >= num_drafts.unsqueeze(1)] = -1
    assert torch.equal(drafts, expected)
    assert torch.equal(scores, confidence)


def walk(
    drafter: DSparkModel, states: torch.Tensor, blocks: list[Block]
) -> tuple[torch.Tensor, ...]:
    """Return drafts, embeddings and confidences of each block's states."""
    assert drafter.can_walk
    base = drafter.compute_base_logits(states.transpose(0, 1).flatten(0, 1))
    base = base.view(states.shape[1], len(blocks), -1)
    anchor_ids = torch.tensor([block.anchor_id for block in blocks])
    ids, embedded = drafter.walk(base, anchor_ids)
    return ids, embedded, drafter.compute_confidence(states, embedded)


def test_heads_that_read_more_than_a_token_do_not_walk(target, tmp_path):
    for changes in (
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"enable_confidence_head": False, "confidence_head_with_markov": False},
    ):
        model = make_drafter(make_config(**changes), target)
        assert not save_and_load(tmp_path, model, target).can_walk


@pytest.mark.parametrize("ggml_type", [None, "Q4_1"], ids=["float", "blocks"])
def test_a_draft_model_is_loaded_as_its_targets_method_asks(ggml_type, tmp_path):
    model, path = tiny_model("llama"), str(tmp_path)
    if ggml_type is None:
        model.save_pretrained(path)
    else:
        path = str(tmp_path / "draft.gguf")
        write_gguf(path, model, "llama", ggml_type)
    plain = load(path)
    target_path = str(tmp_path / "target.gguf")
    write_gguf(target_path, tiny_model("llama"), "llama", "Q8_0")
    for quantization, expected in (
        ("none", {DenseWeight}),
        ("gguf", {QuantizedWeight}),
        ("int8", {QuantizedWeight}),
    ):
        target_config = make_engine_config(target_path, quantization=quantization)
        method = find_drafter_quantization(target_config.model_config, path, CPU)
        draft = load_model(make_engine_config(path), CPU, method)
        assert kinds(draft) == expected
        if expected == {QuantizedWeight}:
            weights = zip(
                *(linear_weights(each) for each in (draft, plain)), strict=True
            )
            for rounded, weight in weights:
                expected_weight = weight
                if ggml_type is None:
                    expected_weight = round_to_blocks(weight).unpack()
                assert torch.equal(rounded, expected_weight)


def linear_weights(model: nn.Module) -> list[torch.Tensor]:
    return [m.unpack() for m in model.modules() if isinstance(m, Linear)]
