"""FSDP in the way of transformers' Trainer: peft's policy makes every trainable leaf a unit of its own."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny_models import adapted, tiny_model, tokens


@pytest.fixture(autouse=True)
def process_group():
    """The first of two processes that are said to be there: nothing is really sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["lora", "lags", "everything"])
def test_forward_and_backward(method):
    everything = {"target_coefficient": True, "coefficients": "thresholded_softmax", "train_threshold": True}
    if method == "lora":
        model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    else:
        model = adapted(tiny_model(), **(everything if method == "everything" else {}))
    policy = fsdp_auto_wrap_policy(model)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    units = [module for module in sharded.modules() if isinstance(module, FullyShardedDataParallel)]
    assert len(units) > 2
    sharded(tokens(2, 9)).logits.sum().backward()
    trained = [parameter for parameter in sharded.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad is not None for parameter in trained)
