"""The small model on a CUDA device: values and gradients of the CPU, in both block sizes, and half precision."""

import copy

import pytest
import torch

from hf_sparsecoding.models.sparse_transformer.configuration_sparse_transformer import MIXERS
from hf_sparsecoding.ops import normalised_threshold
from tests.models.test_sparse_transformer import small, some_inputs


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("block", [64, 1 << 25])
@pytest.mark.parametrize("transfer", ["none", "paper", "aligned"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_equals_the_cpu(mixer, transfer, block, monkeypatch):
    monkeypatch.setattr(normalised_threshold, "GPU_BLOCK_ELEMENTS", block)
    model = small(mixer=mixer, transfer=transfer, score_norm="heads").double()
    there = copy.deepcopy(model).cuda()
    labels = torch.zeros(3, 2, dtype=torch.long)
    expected, actual = model(some_inputs(), labels=labels), there(some_inputs().cuda(), labels=labels.cuda())
    torch.testing.assert_close(actual.logits.cpu(), expected.logits)
    expected.loss.backward()
    actual.loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), parameter.grad, msg=name)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(mixer, dtype):
    model = small(mixer=mixer, transfer="aligned", score_norm="heads").cuda()
    with torch.autocast("cuda", dtype=dtype):
        output = model(some_inputs().cuda(), labels=torch.zeros(3, 2, dtype=torch.long, device="cuda"))
    output.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(output.logits.float(), model(some_inputs().cuda()).logits, rtol=0.1, atol=0.1)
