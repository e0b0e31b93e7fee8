"""transformers' Trainer, with save and resume; two processes, which must train as one does on their joint batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft.utils import load_peft_weights
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.adapter import two_processes
from tests.tiny_models import adapted, tiny_model, tokens


def adapter_state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(
    "config",
    [
        {"target_coefficient": True},
        {"contexts": "segments", "segment_token_ids": list(range(3, 20))},
        {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    ],
    ids=["lags", "segments", "thresholds"],
)
def test_resuming_equals_training_without_a_stop(tmp_path, config):
    data = [{"input_ids": row, "labels": row} for row in tokens(16, 9)]

    def trainer(folder, callbacks=()):
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        model = adapted(tiny_model(), init_weights=True, **config)
        return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))

    whole = trainer(tmp_path / "whole")
    fresh = adapter_state(whole.model)
    whole.train()
    expected = adapter_state(whole.model)
    assert all(not torch.equal(expected[name], fresh[name]) for name in fresh)

    trainer(tmp_path / "stopped", [StopAt(3)]).train()
    saved = load_peft_weights(tmp_path / "stopped" / "checkpoint-3", device="cpu")
    assert len(saved) == len(expected)
    resumed = trainer(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    for name, parameter in adapter_state(resumed.model).items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.timeout(600)
def test_two_processes_equal_one_with_the_joint_batch(tmp_path):
    root, script = Path(__file__).parents[2], two_processes.__file__
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path],
        # without ACCELERATE_USE_CPU there are two processes that do not know of each other
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    expected = two_processes.train(two_processes.build(), two_processes.batches())
    for rank in ranks:
        assert rank["wrapper"] == "DistributedDataParallel"
        assert rank["num_processes"] == 2
        for name, parameter in expected.items():
            torch.testing.assert_close(rank["state"][name], parameter, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(p, two_processes.build().state_dict()[name]) for name, p in expected.items())
