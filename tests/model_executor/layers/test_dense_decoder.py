import pytest
import torch

from tests.markers import needs_cpu_ops
from tests.model_executor.harness import Session, load, make_config
from tests.model_executor.hf_reference import tiny_model
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.interfaces import CausalLM, SupportsTaps
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

TOKENS = [1, 17, 5, 90, 33, 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    reference = tiny_model("qwen3", num_hidden_layers=3)
    reference.save_pretrained(folder)
    return str(folder), reference


@pytest.fixture
def model(checkpoint):
    return load(checkpoint[0])


def test_model_keeps_its_interfaces(model):
    assert isinstance(model, CausalLM)
    assert isinstance(model, SupportsTaps)


def test_forward_without_taps_is_one_tensor(model):
    hidden_states = Session(model).forward(TOKENS)
    assert hidden_states.shape == (len(TOKENS), 64)


def test_taps_are_the_streams_that_enter_layers_in_the_asked_order(model, checkpoint):
    model.set_aux_hidden_state_layers((3, 0, 2))
    hidden_states, taps = Session(model).forward(TOKENS)
    reference = checkpoint[1]
    with torch.inference_mode():
        out = reference.model(torch.tensor([TOKENS]), output_hidden_states=True)
        entering = [states[0] for states in out.hidden_states]
        # The reference's last entry is already normalised.
        assert torch.equal(entering[3], out.last_hidden_state[0])
        normalised = reference.model.norm(taps[0])
    torch.testing.assert_close(taps[1], entering[0], rtol=0, atol=0)
    torch.testing.assert_close(taps[2], entering[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normalised, entering[3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden_states, entering[3], rtol=1e-4, atol=1e-4)


def test_taps_equal_what_forward_hooks_of_the_layers_see(model, checkpoint):
    reference, outputs = checkpoint[1], {}
    modules = {-1: reference.model.embed_tokens}
    modules |= dict(enumerate(reference.model.layers))

    def keep(layer_idx):
        return lambda _module, _args, out: outputs.update({layer_idx: out})

    handles = [m.register_forward_hook(keep(i)) for i, m in modules.items()]
    try:
        with torch.inference_mode():
            reference(torch.tensor([TOKENS]))
    finally:
        for handle in handles:
            handle.remove()
    # The output of layer i is the stream that enters layer i + 1.
    drafters_ids = (-1, 0, 1)
    model.set_aux_hidden_state_layers(tuple(i + 1 for i in drafters_ids))
    _, taps = Session(model).forward(TOKENS)
    for layer_idx, tap in zip(drafters_ids, taps, strict=True):
        expected = outputs[layer_idx]
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(tap, expected.view(6, 64), rtol=1e-4, atol=1e-4)


def test_taps_do_not_change_the_hidden_states(model):
    plain = Session(model).forward(TOKENS)
    model.set_aux_hidden_state_layers((1, 2))
    hidden_states, _ = Session(model).forward(TOKENS)
    assert torch.equal(hidden_states, plain)
    model.set_aux_hidden_state_layers(())
    assert torch.equal(Session(model).forward(TOKENS), plain)


@needs_cpu_ops
def test_layers_give_the_same_bits_in_one_operation_and_one_by_one(
    checkpoint, monkeypatch
):
    model = load(checkpoint[0])
    model.set_aux_hidden_state_layers((1, 3))
    hidden_states, taps = Session(model).forward(TOKENS)
    monkeypatch.setattr(CPUAttentionBackend, "maybe_fuse_layers", lambda _: None)
    model = load(checkpoint[0])
    model.set_aux_hidden_state_layers((1, 3))
    expected, expected_taps = Session(model).forward(TOKENS)
    assert torch.equal(hidden_states, expected)
    assert all(map(torch.equal, taps, expected_taps))


@needs_cpu_ops
def test_layers_are_one_operation_with_taps_too(checkpoint, monkeypatch):
    fuse, tapped = CPUAttentionBackend.maybe_fuse_layers, []

    def record(layers):
        run = fuse(layers)
        return lambda *args: (tapped.append(args[-2]), run(*args))

    monkeypatch.setattr(CPUAttentionBackend, "maybe_fuse_layers", record)
    model = load(checkpoint[0])
    Session(model).forward(TOKENS)
    assert tapped == [()]
    model.set_aux_hidden_state_layers((3, 0, 2))
    Session(model).forward(TOKENS)
    assert tapped[1:] == [(3, 0, 2)]


@pytest.mark.parametrize("layer_ids", [(4,), (-1,), (1, 1)])
def test_taps_of_layers_that_are_not_there_are_refused(layer_ids, model):
    with pytest.raises(ValueError, match="different ids in 0..3"):
        model.set_aux_hidden_state_layers(layer_ids)


def test_cache_specs_name_every_attention_layer(model):
    spec = FullAttentionSpec(16, 2, 32, torch.float16)
    assert model.get_kv_cache_specs(16, torch.float16) == {
        f"model.layers.{i}.self_attn.attn": spec for i in range(3)
    }


def test_profiling_run_needs_no_cache(model):
    with torch.inference_mode(), set_forward_context(ForwardContext(None, {})):
        hidden_states = model(torch.tensor(TOKENS), torch.arange(len(TOKENS)))
    assert hidden_states.isfinite().all()


def test_logits_of_no_rows_are_empty(model):
    with torch.inference_mode():
        logits = model.compute_logits(torch.empty(0, 64))
    assert logits.shape == (0, 96)
    assert logits.dtype is torch.float32


def test_every_tensor_is_on_the_models_device(checkpoint, device):
    model = load_model(make_config(checkpoint[0]), device)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {device.type}
    token_ids = torch.tensor(TOKENS, device=device)
    positions = torch.arange(len(TOKENS), device=device)
    with torch.inference_mode(), set_forward_context(ForwardContext(None, {})):
        logits = model.compute_logits(model(token_ids, positions))
    assert logits.device.type == device.type
