import pytest

from hf_sparsecoding.training import TrainingArguments, make_accelerator


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": -4}, "batch_size must be at least 1, got -4"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, muon, got 'adam'"),
        ({"schedule": "cosin"}, "schedule must be one of linear, cosine, constant, got 'cosin'"),
        ({"mixed_precision": "bf8"}, "mixed_precision must be one of no, bf16, fp16, got 'bf8'"),
        ({"steps": 5, "warmup_steps": 5}, r"warmup_steps must be below steps \(5\), got 5"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "got 6 and 4"),
    ],
)
def test_bad_values_name_the_value(values, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**values)


def test_batch_must_divide_among_processes():
    arguments = TrainingArguments(batch_size=6, gradient_accumulation_steps=2)
    assert arguments.micro_batch_size(3) == 1
    with pytest.raises(ValueError, match="make batch_size a multiple of 8"):
        arguments.micro_batch_size(4)


def test_identity_leaves_out_bookkeeping():
    one = TrainingArguments(output_dir="a", checkpoint_every=1, report_to="wandb", progress=False)
    assert one.identity() == TrainingArguments(output_dir="b").identity()
    assert one.identity() != TrainingArguments(learning_rate=1e-3).identity()


def test_unknown_and_missing_trackers_are_errors():
    with pytest.raises(ValueError, match="got 'tensorbord'"):
        make_accelerator(TrainingArguments(report_to="tensorbord"))
    with pytest.raises(ImportError, match="pip install clearml"):
        make_accelerator(TrainingArguments(report_to="clearml"))
