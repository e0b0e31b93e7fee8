"""TRL's SFTTrainer: given a config or a wrapped model, packed or not; saved and loaded again."""

from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from peft.utils import get_peft_model_state_dict

from hf_sparsecoding import SparseCodingConfig
from tests.tiny_models import adapted, tiny_model, tokens
from tests.training.character_model import character_tokenizer


trl = pytest.importorskip("trl", reason="trl is optional: pip install trl")

KINDS = {
    "lags": {"lags": [1, 3], "target_coefficient": True},
    "segments": {"contexts": "segments", "segment_token_ids": character_tokenizer()("\n")["input_ids"]},
    "thresholds": {"coefficients": "thresholded_softmax", "threshold": 0.02, "train_threshold": True},
}
# documents of different lengths, each of several segments
PUZZLES = [{"prompt": f"{i} {i}\n" * (1 + i % 3) + f"{i} ", "completion": f"{i}"} for i in range(8)]


def make_trainer(folder, model, peft_config=None, **changes):
    arguments = trl.SFTConfig(
        str(folder),
        **{
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.05,
            "bf16": False,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        },
    )
    return trl.SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(PUZZLES),
        processing_class=character_tokenizer(),
        peft_config=peft_config,
    )


@pytest.mark.parametrize(("kind", "packing"), [("lags", False), ("segments", True), ("thresholds", False)])
def test_training(tmp_path, kind, packing):
    config = {"task_type": "CAUSAL_LM", **KINDS[kind]}
    options = {"packing": packing, "max_length": 32}
    trainer = make_trainer(tmp_path / "a", tiny_model(), SparseCodingConfig(**config), **options)
    fresh = {name: value.clone() for name, value in get_peft_model_state_dict(trainer.model).items()}
    trainer.train()
    trained = get_peft_model_state_dict(trainer.model)
    assert all(value.isfinite().all() and not torch.equal(value, fresh[name]) for name, value in trained.items())

    wrapped = make_trainer(tmp_path / "b", adapted(tiny_model(), init_weights=True, **config), **options)
    wrapped.train()
    for name, value in get_peft_model_state_dict(wrapped.model).items():
        assert torch.equal(value, trained[name]), name

    trainer.save_model(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "saved")
    ids = tokens(2, 9)
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_alone(tmp_path, kind):
    """The trainer's loss of a packed batch, and its gradients, are those of the documents one by one."""
    trainer = make_trainer(tmp_path, adapted(tiny_model(), **KINDS[kind]), packing=True, max_length=40)
    batch = next(iter(trainer.get_train_dataloader()))
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    assert batch["input_ids"].shape[0] == 1
    assert len(starts) - 1 == len(PUZZLES)
    model = trainer.model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss_and_gradients(inputs):
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=1)  # the sum over the tokens
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    alone = [
        loss_and_gradients({name: batch[name][:, start:end] for name in ("input_ids", "labels", "position_ids")})
        for start, end in pairwise(starts)
    ]
    expected = [sum(values) for values in zip(*alone, strict=True)]
    torch.testing.assert_close(loss_and_gradients(dict(batch)), expected, atol=1e-3, rtol=1e-4)

    leaking = {name: batch[name] for name in ("input_ids", "labels")}
    leaking["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(loss_and_gradients(leaking), expected, atol=0.1, rtol=1e-3)
