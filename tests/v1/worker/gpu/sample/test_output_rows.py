import pytest
import torch

from tests.v1.worker.gpu.output_layers import OutputLayer
from vllm.v1.worker.gpu.sample.output_rows import OutputRows

NAN, INF = float("nan"), float("inf")


def test_nothing_is_computed_before_it_is_asked_for(device):
    layer = OutputLayer(finds_argmax=True)
    outputs = OutputRows(layer, torch.zeros(3, 4, device=device))
    assert (len(outputs), outputs.device.type) == (3, device.type)
    assert layer.passes == []


def test_logits_are_computed_once(device):
    layer = OutputLayer(finds_argmax=True)
    outputs = OutputRows(layer, torch.randn(3, 4, device=device))
    assert outputs.logits is outputs.logits
    assert layer.passes == ["logits"]


def test_logits_that_are_there_are_not_computed_again(device):
    layer = OutputLayer(finds_argmax=True)
    outputs = OutputRows(layer, torch.tensor([[1.0, 3.0, 2.0]], device=device))
    outputs.logits[0, 0] = 4.0
    assert outputs.argmax().tolist() == [0]
    assert layer.passes == ["logits"]


@pytest.mark.parametrize("finds_argmax", [False, True])
def test_the_argmax_is_the_first_largest_that_is_a_number(device, finds_argmax):
    layer = OutputLayer(finds_argmax=finds_argmax)
    rows = [[NAN, 1.0, 1.0], [-INF, NAN, -INF], [0.0, -INF, INF], [-2.0, NAN, -3.0]]
    token_ids = OutputRows(layer, torch.tensor(rows, device=device)).argmax()
    assert token_ids.tolist() == [1, -1, 2, 0]
    assert layer.passes == (["argmax"] if finds_argmax else ["logits"])


def test_statistics_are_of_the_rows_that_are_named(device):
    layer = OutputLayer(finds_argmax=True)
    outputs = OutputRows(layer, torch.tensor([[0.0, 2.0], [3.0, 1.0]], device=device))
    second = torch.tensor([1], device=device)
    one = outputs.maybe_statistics(second, 1, outputs.no_rows)
    assert (one.argmax.tolist(), one.ids.tolist()) == ([1, 0], [[0]])
    assert one.written.shape == (0, 2)
    both = outputs.maybe_statistics(outputs.all_rows, 2, second)
    assert both.ids.tolist() == [[1, 0], [0, 1]]
    assert both.written.tolist() == [[3.0, 1.0]]
    assert layer.passes == ["statistics"] * 2


@pytest.mark.parametrize("finds_argmax", [False, True])
def test_logits_that_are_there_have_no_statistics_beside_them(device, finds_argmax):
    layer = OutputLayer(finds_argmax=finds_argmax)
    outputs = OutputRows(layer, torch.zeros(3, 4, device=device))
    if finds_argmax:
        assert outputs.logits.shape == (3, 4)
    assert outputs.maybe_statistics(outputs.all_rows, 1, outputs.no_rows) is None
