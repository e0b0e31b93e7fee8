"""Fine-tuning on commonsense records: results, packing, exact resume after kill -9, processes, what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from hf_sparsecoding.reports import results
from hf_sparsecoding.training.command_line import parse, to_flags
from hf_sparsecoding.training.completions import Completion
from hf_sparsecoding.training.responses import Collator, encode_records, shorten
from scripts import finetune_commonsense as script
from scripts.finetune_commonsense import FineTuneArguments, TrainerArguments
from tests.evaluation.commonsense_model import save_word_model, word_model, word_tokenizer, write_data
from tests.tiny_models import adapted, tokens
from tests.training.character_model import forked, run_distributed


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts" / "configs"
LAGS = {"peft_type": "SPARSECODING", "num_contexts": 2, "target_coefficient": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commonsense")
    return {"model": save_word_model(folder / "model"), "data": write_data(folder / "data")}


def flags(folders, output, **changes):
    values = {
        **folders,
        "tasks": ["arc_easy", "boolq"],
        "adapter_config": LAGS,
        "output_dir": str(output),
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.05,
        "warmup_steps": 1,
        "logging_steps": 3,
        "save_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    return to_flags(values)


def run_of(folder) -> dict:
    return results.load(folder / "results.json")["runs"][0]


def losses(folder) -> list[float]:
    return [entry["loss"] for entry in run_of(folder)["history"]]


def same_adapters(*folders) -> bool:
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """A run without an interruption."""
    output = tmp_path_factory.mktemp("whole")
    assert script.main(flags(folders, output, experiment="tiny", method="lags")) == 0
    return output


def test_run_writes_adapter_and_results(folders, whole):
    written, run = results.load(whole / "results.json"), run_of(whole)
    assert (written["experiment"], run["method"], run["seed"], run["samples"]) == ("tiny", "lags", 0, 48)
    assert run["trainable_parameters"] == 2 * 4 * 3
    settings = run["settings"]
    assert (settings["records"], settings["longer_records"], settings["num_processes"]) == (48, 0, 1)
    assert settings["test_duplicates"] == {"arc_easy": 1, "boolq": 1}
    assert settings["adapter_config"]["num_contexts"] == 2
    # entries where asked for, before each checkpoint and at the end
    assert [entry["step"] for entry in run["history"]] == [2, 3, 4, 6]
    assert run["history"][-1]["loss"] == run["metrics"]["train_loss"] < run["history"][0]["loss"]
    assert run["metrics"]["step_seconds"] > 0
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["model"]), whole)


def test_killed_run_resumes_exactly(folders, whole, tmp_path, caplog):
    """The second checkpoint lacks its last files: kill -9 came while it was being written."""

    def killed():
        saved = []

        def die_at_second(trainer, folder, save=Trainer._save_rng_state):
            saved.append(folder)
            if len(saved) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            save(trainer, folder)

        Trainer._save_rng_state = die_at_second
        script.main(flags(folders, tmp_path))

    process = forked(killed)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "results.json").exists()
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    script.main(flags(folders, tmp_path))
    assert "skipping the damaged checkpoint" in caplog.text
    assert losses(tmp_path) == losses(whole)
    assert same_adapters(tmp_path, whole)
    # a finished run that is started again reports the same
    script.main(flags(folders, tmp_path))
    assert losses(tmp_path) == losses(whole)
    with pytest.raises(
        ValueError, match=r"cannot resume .*: learning_rate \(checkpoint: 0.05, now: 0.1\).*--no_resume"
    ):
        script.main(flags(folders, tmp_path, learning_rate=0.1))
    own = tmp_path / "checkpoint-best"
    own.mkdir()
    with pytest.raises(ValueError, match="checkpoint-best is no checkpoint of this script, and Trainer would delete"):
        script.main([*flags(folders, tmp_path, learning_rate=0.1), "--no_resume"])
    own.rename(tmp_path / "best")
    script.main([*flags(folders, tmp_path, learning_rate=0.1), "--no_resume"])
    assert (tmp_path / "best").is_dir()
    assert losses(tmp_path) != losses(whole)


def test_packing_and_activation_checkpointing_change_nothing(folders, whole, tmp_path):
    script.main(flags(folders, tmp_path, packing=True, activation_checkpointing=True))
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    "config", [{}, {"contexts": "segments", "segment_token_ids": [5, 6, 7, 8]}], ids=["lags", "segments"]
)
def test_loss_is_the_mean_over_all_responses(attention, packing, config):
    """As computed record by record, without padding; documents in one row do not see each other."""
    model = adapted(word_model(attn_implementation=attention), **config)
    model.config.use_cache = False  # as Trainer sets it
    rows = [row[:length].tolist() for row, length in zip(tokens(3, 12), (12, 7, 9), strict=True)]
    features = [{"input_ids": row, "labels": [-100] * (3 + i) + row[3 + i :]} for i, row in enumerate(rows)]
    total = sum(
        len(row) * model(**{name: torch.tensor([value]) for name, value in feature.items()}).loss.item()
        for feature in features
        for row in [[label for label in feature["labels"] if label != -100]]
    )
    expected = total / sum(label != -100 for feature in features for label in feature["labels"])
    for select in (False, True):
        batch = Collator(0, packing, select)(features)
        assert batch["input_ids"].shape == ((1, 28) if packing else (3, 12))
        assert ("shift_labels" in batch) == select
        assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_two_processes_give_the_losses_of_one(folders, whole, tmp_path):
    run_distributed(lambda: script.main(flags(folders, tmp_path, per_device_train_batch_size=4)))
    settings = run_of(tmp_path)["settings"]
    assert (settings["num_processes"], settings["batch_size"]) == (2, 8)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)


def shard_on_cpu() -> None:
    """Let accelerate turn FSDP on, which it does for GPUs alone; torch's works on a CPU too."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true"}
    fields = yaml.safe_load((CONFIGS / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    os.environ |= {name.upper(): str(value).lower() for name, value in fields.items() if isinstance(value, bool)}
    os.environ |= {name.upper(): str(value) for name, value in fields.items() if not isinstance(value, bool)}

    def pretend(trainer, create=Trainer.create_accelerator_and_postprocess):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(trainer)
        assert trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2

    Trainer.create_accelerator_and_postprocess = pretend


def test_sharded_run_gives_the_losses_of_one_process(folders, whole, tmp_path):
    def work():
        shard_on_cpu()
        script.main(flags(folders, tmp_path, per_device_train_batch_size=4))

    run_distributed(work)
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (whole, tmp_path))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)
    # goes on from a sharded checkpoint
    expected = losses(tmp_path)
    for name in ("checkpoint-6/checkpoint.json", "results.json"):
        (tmp_path / name).unlink()
    run_distributed(work)
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-6)


def test_unsharded_fsdp_is_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"accelerate does not shard on DistributedType.NO .*ddp.yaml"):
        script.main(flags(folders, tmp_path))


def test_long_prompts_lose_their_left(folders, tmp_path):
    example = Completion((1, 10, 11, 12, 13), (20, 21))
    assert shorten(example, 7, 1) is example
    assert shorten(example, 5, 1) == Completion((1, 12, 13), (20, 21))
    assert shorten(example, 5, None) == Completion((11, 12, 13), (20, 21))
    with pytest.raises(
        ValueError, match="max_length must leave room for a prompt beside a response of 2 tokens, got 2"
    ):
        shorten(example, 2, None)
    record = {"prompt": "the correct answer", "completion": "is a"}
    encoded, longer = encode_records(word_tokenizer(), [record] * 2, 6)
    assert longer == 2
    row = encoded[1]
    assert word_tokenizer().convert_ids_to_tokens(row["input_ids"]) == [" ", "answer", "is", " ", "a", "</s>"]
    assert row["labels"] == [-100, -100, *row["input_ids"][2:]]


def test_records_are_drawn_by_the_seed(folders):
    arguments = FineTuneArguments(**folders, adapter_config="x", tasks=["boolq"], records=5)
    drawn = [script.read_records(arguments, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(records) for records in drawn] == [5, 5, 5]


def test_losses_that_are_not_finite_end_the_run(folders, tmp_path):
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 2; lower learning_rate \(1e\+39\)"):
        script.main(flags(folders, tmp_path, learning_rate=1e39, warmup_steps=0, max_grad_norm=0, logging_steps=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is missing: base model"),
        ({"adapter_config": ""}, "--adapter_config is missing: PEFT config"),
        ({"adapter_config": {"peft_type": "LORRA"}}, "got 'LORRA'; did you mean 'LORA'"),
        ({"tasks": ["boolqq"]}, "unknown task 'boolqq'; did you mean 'boolq'"),
        ({"tasks": ["commonsense_170k", "boolq"]}, "commonsense_170k holds all tasks; give it alone"),
        ({"tasks": ["boolq", "boolq"]}, "tasks must be at least one and each only once"),
        ({"tasks": ["piqa"]}, "has no piqa/train.json"),
        ({"data": "nowhere"}, "no such folder: nowhere"),
        ({"records": 0}, "records must be at least 1, got 0"),
        ({"records": 49}, "records must be at most 48, as many as there are, got 49"),
        ({"max_length": 9}, r"max_length must leave room for a prompt beside a response of 11 tokens, got 9"),
        ({"dtype": "float64x"}, "dtype must be one of auto, float32"),
        ({"save_total_limit": 1}, "save_total_limit must be at least 2"),
        ({"eval_strategy": "steps"}, "eval_strategy='steps': nothing is held out to evaluate on"),
        ({"resume_from_checkpoint": "x"}, "resume_from_checkpoint='x': use --resume"),
    ],
)
def test_bad_input_is_found_before_the_model_is_loaded(folders, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(script, "load_model", lambda *arguments: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        script.main(flags(folders, tmp_path, **changes))


def test_missing_model_is_named(folders, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        script.main(flags(folders, tmp_path, model=str(tmp_path / "nowhere")))


def test_processes_that_do_not_know_of_each_other_are_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ValueError, match="2 processes were started that do not know of each other.*ACCELERATE_USE_CPU=1"
    ):
        TrainerArguments.__post_init__(parse([TrainerArguments], [], "")[0])


def test_configs_are_valid():
    sweep = yaml.safe_load((CONFIGS / "commonsense" / "smollm2.yaml").read_text())
    assert (ROOT / sweep["command"]).is_file()
    for options in sweep["methods"].values():
        arguments, training = parse(
            [FineTuneArguments, TrainerArguments], to_flags({**sweep["common"], **options}), ""
        )
        script.read_adapter_config(arguments.adapter_config)
        assert training.max_steps > training.warmup_steps
    config = ["--config", str(CONFIGS / "commonsense" / "llama_7b.yaml"), "--use_cpu"]
    arguments, training = parse([FineTuneArguments, TrainerArguments], config, "")
    assert script.read_adapter_config(arguments.adapter_config).r == 32
    assert (training.batch_size, training.num_train_epochs, training.learning_rate) == (16, 3, 3e-4)
    assert arguments.tasks == ["commonsense_170k"]
    for path in (CONFIGS / "accelerate").glob("*.yaml"):
        assert load_config_from_file(str(path)).num_processes == 2


@pytest.mark.slow
def test_launched_in_two_processes(folders, whole, tmp_path):
    """The command of two_cpu_processes.yaml."""
    config = CONFIGS / "accelerate" / "two_cpu_processes.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    changed = flags(folders, tmp_path, per_device_train_batch_size=4, use_cpu=None)
    command = [*launcher, str(ROOT / "scripts" / "finetune_commonsense.py"), *changed]
    subprocess.run(command, env={**os.environ, "ACCELERATE_USE_CPU": "1"}, check=True, timeout=280)
    assert run_of(tmp_path)["settings"]["num_processes"] == 2
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)
    assert json.loads((tmp_path / "checkpoint-6" / "checkpoint.json").read_text())["step"] == 6
