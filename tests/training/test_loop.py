import json
import logging
import math
import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, on_main_process
from safetensors.torch import load_file

from hf_sparsecoding.training import ShuffledOrder, checkpoints, loop, make_accelerator, train
from tests.training.character_model import forked, run_distributed
from tests.training.toy_regression import (
    arguments,
    batch,
    distributed_run,
    equal,
    make_model,
    mse,
    weights,
)


def test_order_holds_every_item_once_per_epoch():
    order = ShuffledOrder(5, seed=0)
    epochs = [order(start, 5) for start in (0, 5)]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 2
    assert epochs[0] != epochs[1]
    assert order(3, 4) == [*epochs[0][3:], *epochs[1][:2]]
    assert ShuffledOrder(5, seed=1)(0, 5) != epochs[0]


def test_training_lowers_the_loss_and_leaves_frozen_parameters(tmp_path):
    model = make_model()
    before = weights(model)
    result = train(model, batch, mse, arguments(tmp_path, steps=60, learning_rate=3e-2, checkpoint_every=0))
    assert result.losses[-1] < 0.2 * result.losses[0]
    assert torch.equal(model[0].bias, before["0.bias"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert result.step_seconds > 0
    assert not (tmp_path / "checkpoints").exists()


def test_killed_run_goes_on_bit_for_bit(tmp_path):
    """kill -9 in step 8, whose last checkpoint is that of step 6; dropout makes the random numbers matter."""
    whole = make_model(dropout=0.3)
    expected = train(whole, batch, mse, arguments(tmp_path / "whole"))

    def slow_batch(start, count):
        if start == 7 * 8:
            (tmp_path / "in_step_8").touch()
            time.sleep(120)
        return batch(start, count)

    killed = arguments(tmp_path / "killed")
    process = forked(lambda: train(make_model(dropout=0.3), slow_batch, mse, killed))
    deadline = time.monotonic() + 60
    while not (tmp_path / "in_step_8").exists() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    newest = checkpoints.newest(tmp_path / "killed" / "checkpoints")
    assert newest.name == "step-00000006"

    resumed = make_model(dropout=0.3)
    seen = []
    result = train(resumed, lambda start, count: seen.append(start) or batch(start, count), mse, killed)
    assert seen[0] == 6 * 8
    assert result.losses == expected.losses
    assert len(result.seconds) == 9
    assert equal(weights(resumed), weights(whole))


def test_finished_run_is_not_trained_again(tmp_path):
    model = make_model()
    first = train(model, batch, mse, arguments(tmp_path))
    again = make_model()
    assert train(again, None, None, arguments(tmp_path)).losses == first.losses
    assert equal(weights(again), weights(model))


def test_no_resume_starts_afresh(tmp_path):
    train(make_model(), batch, mse, arguments(tmp_path))
    result = train(make_model(), batch, mse, arguments(tmp_path, resume=False, learning_rate=1e-3))
    assert len(result.losses) == 9
    index = json.loads((checkpoints.newest(tmp_path / "checkpoints") / checkpoints.INDEX).read_text())
    assert index["identity"]["learning_rate"] == 1e-3


def test_other_settings_are_refused_by_name(tmp_path):
    train(make_model(), batch, mse, arguments(tmp_path), settings={"data": "a", "options": (1, 2)})
    train(make_model(), batch, mse, arguments(tmp_path, logging_every=1), settings={"data": "a", "options": (1, 2)})
    other = arguments(tmp_path, learning_rate=1.0)
    with pytest.raises(ValueError, match=r"data \(checkpoint: 'a', now: 'b'\); learning_rate \(checkpoint: 0.01"):
        train(make_model(), batch, mse, other, settings={"data": "b", "options": [1, 2]})


def test_a_damaged_checkpoint_does_not_outlive_the_next_one(tmp_path):
    """Training went on from an earlier one and saves before it comes to the damaged one's step."""
    for step in (30, 50, 100):
        checkpoints.save(tmp_path, make_model(), {}, {"step": step, "identity": {}}, keep=3)
    (tmp_path / "step-00000100" / checkpoints.INDEX).unlink()
    checkpoints.save(tmp_path, make_model(), {}, {"step": 60, "identity": {}}, keep=2)
    assert [path.name for path in checkpoints.candidates(tmp_path)] == ["step-00000060", "step-00000050"]


def test_damaged_checkpoints_are_passed_over(tmp_path, caplog):
    train(make_model(), batch, mse, arguments(tmp_path, checkpoints_kept=3))
    folder = tmp_path / "checkpoints"
    newest, middle, oldest = checkpoints.candidates(folder)
    (newest / checkpoints.INDEX).write_text("{")
    content = (middle / checkpoints.STATE).read_bytes()
    (middle / checkpoints.STATE).write_bytes(content[: len(content) // 2])
    (folder / f"{checkpoints.PARTIAL}step-00000012").mkdir()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest(folder) == oldest
    assert str(newest) in caplog.text
    assert f"{middle}: state.pt does not match its checksum" in caplog.text
    # the damaged ones are written anew
    result = train(make_model(), batch, mse, arguments(tmp_path, checkpoints_kept=3))
    assert len(result.losses) == 9
    assert checkpoints.damage(newest) is None


def test_checkpoints_hold_the_trainable_parameters_only(tmp_path):
    model = make_model()
    train(model, batch, mse, arguments(tmp_path, steps=12, checkpoints_kept=2))
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoints.candidates(folder)] == ["step-00000012", "step-00000009"]
    stored = checkpoints.load_file(checkpoints.newest(folder) / checkpoints.WEIGHTS)
    assert set(stored) == {"0.weight", "3.weight", "3.bias"}
    assert not list(folder.glob(f"{checkpoints.PARTIAL}*"))


def test_checkpoint_of_another_model_is_refused(tmp_path):
    train(make_model(), batch, mse, arguments(tmp_path))
    with pytest.raises(ValueError, match=r"0\.bias has shape None there and \(4,\) here"):
        train(make_model().requires_grad_(True), batch, mse, arguments(tmp_path))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_give_the_result_of_one(tmp_path, accumulation):
    expected_model = make_model()
    expected = train(expected_model, batch, mse, arguments(tmp_path / "one"))
    run_distributed(partial(distributed_run, tmp_path, gradient_accumulation_steps=accumulation))
    for rank in (0, 1):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (report["processes"], report["wrappers"]) == (2, ["DistributedDataParallel"])
        assert report["losses"] == pytest.approx(expected.losses, rel=1e-5)
        for name, value in torch.load(tmp_path / f"{rank}.pt").items():
            torch.testing.assert_close(value, expected_model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_two_processes_resume_exactly(tmp_path):
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    run_distributed(partial(distributed_run, tmp_path / "whole"))
    whole = json.loads((tmp_path / "whole" / "0.json").read_text())
    run_distributed(partial(distributed_run, tmp_path / "cut"))
    newest = checkpoints.newest(tmp_path / "cut" / "checkpoints")
    (newest / checkpoints.STATE).unlink()  # the run ended after step 6
    run_distributed(partial(distributed_run, tmp_path / "cut"))
    assert json.loads((tmp_path / "cut" / "1.json").read_text())["losses"] == whole["losses"]


def test_accumulation_gives_the_same_steps(tmp_path):
    one, four = make_model(), make_model()
    expected = train(one, batch, mse, arguments(tmp_path / "1"))
    result = train(four, batch, mse, arguments(tmp_path / "4", gradient_accumulation_steps=4))
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(one.state_dict(), four.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_data_loader_left_behind_does_not_end_a_step(tmp_path):
    class Exhausted:
        end_of_dataloader, remainder = True, -1

    loader, state = Exhausted(), GradientState()
    state._add_dataloader(loader)
    try:
        test_accumulation_gives_the_same_steps(tmp_path)
    finally:
        state._remove_dataloader(loader)


def test_loss_that_is_not_finite_stops_the_run(tmp_path):
    def broken(model, examples):
        return mse(model, examples) * (math.nan if broken.steps > 1 else 1.0)

    broken.steps = 0

    def counting(start, count):
        broken.steps += 1
        return batch(start, count)

    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 2; lower learning_rate \(0.01\)"):
        train(make_model(), counting, broken, arguments(tmp_path))


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="2 processes were started .*not know of each other.*ACCELERATE_USE_CPU=1"):
        train(make_model(), batch, mse, arguments(tmp_path))


def test_model_without_trainable_parameters(tmp_path):
    with pytest.raises(ValueError, match="no trainable parameter"):
        train(make_model().requires_grad_(False), batch, mse, arguments(tmp_path))


def test_evaluations_and_tracker(tmp_path, monkeypatch):
    logged = []

    class Notebook(GeneralTracker):
        name, requires_logging_directory, main_process_only = "notebook", False, True

        def __init__(self, project, **kwargs):
            super().__init__()

        @property
        def tracker(self):
            return logged

        def store_init_configuration(self, values):
            logged.append(values)

        @on_main_process
        def log(self, values, step, **kwargs):
            logged.append((step, values))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    modes, clock = [], [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow_batch(start, count):
        clock[0] += 2.0
        return batch(start, count)

    def evaluate(model):
        modes.append((model.training, torch.is_grad_enabled()))
        clock[0] += 100.0
        return {"score": float(len(modes))}

    chosen = arguments(tmp_path, report_to="notebook", logging_every=4, evaluate_every=3)
    result = train(make_model(), slow_batch, mse, chosen, evaluate=evaluate, settings={"nested": {"a": 1}})
    assert logged[0]["nested"] == '{"a": 1}'
    assert [step for step, _ in logged[1:]] == [3, 4, 6, 8, 9]
    assert logged[1][1]["score"] == 1.0
    assert modes == [(False, False)] * 3
    assert result.evaluations == [{"step": step, "score": step / 3} for step in (3, 6, 9)]
    assert result.step_seconds == 2.0  # evaluations are not timed


def test_data_does_not_depend_on_numpy_state():
    np.random.seed(0)
    one = batch(0, 4)["inputs"]
    np.random.seed(1)
    assert torch.equal(one, batch(0, 4)["inputs"])


def test_checkpoints_from_before_there_was_a_choice_of_optimizers(tmp_path):
    train(make_model(), batch, mse, arguments(tmp_path))
    index = checkpoints.newest(tmp_path / "checkpoints") / checkpoints.INDEX
    content = json.loads(index.read_text())
    assert content["identity"].pop("optimizer") == "adamw"
    index.write_text(json.dumps(content))
    assert len(train(make_model(), batch, mse, arguments(tmp_path)).losses) == 9
    with pytest.raises(ValueError, match=r"optimizer \(checkpoint: 'adamw', now: 'sgd'\)"):
        train(make_model(), batch, mse, arguments(tmp_path, optimizer="sgd"))


def test_cosine_ends_at_its_share(tmp_path):
    rates = []
    options = {"schedule": "cosine", "final_learning_rate_share": 0.1, "learning_rate": 1e-2, "steps": 50}
    run = loop._Run(make_model(), arguments(tmp_path, **options), make_accelerator(arguments(tmp_path, **options)), {})
    for step in range(50):
        rates.append(run.learning_rate)
        run.step(step, batch, mse)
    rates.append(run.learning_rate)
    assert rates[0] == 0
    assert rates[1] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[1:] == sorted(rates[1:], reverse=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_trained_model_computes_in_float32(tmp_path):
    """What is saved is what is measured after training; in training it is another thing."""
    model, dtypes = make_model(), []
    model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    train(model, batch, mse, arguments(tmp_path, mixed_precision="bf16", steps=2))
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    model(batch(0, 4)["inputs"])
    assert dtypes == [torch.float32]


@pytest.mark.slow
def test_compiled_training_gives_the_same_losses(tmp_path):
    plain = train(make_model(), batch, mse, arguments(tmp_path / "plain"))
    compiled = train(make_model(), batch, mse, arguments(tmp_path / "compiled", compile=True))
    np.testing.assert_allclose(compiled.losses, plain.losses, rtol=1e-5)
    # a checkpoint does not know that there was a compiler
    assert checkpoints.newest(tmp_path / "compiled" / "checkpoints")
    names = [load_file(next((tmp_path / run).rglob(checkpoints.WEIGHTS))).keys() for run in ("plain", "compiled")]
    assert names[0] == names[1]
