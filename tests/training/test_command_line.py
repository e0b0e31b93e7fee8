import json
from dataclasses import dataclass, field

import pytest

from hf_sparsecoding.training import TrainingArguments
from hf_sparsecoding.training.command_line import parse, read_mapping, to_flags


@dataclass(frozen=True)
class Task:
    options: str = field(default="{}")
    plots: bool = field(default=True)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_flags_override_the_file(tmp_path):
    text = "learning_rate: 1e-3\nsteps: 30\noptions: {features: 2}\nplots: false\nresume: true\n"
    config = write(tmp_path / "c.yaml", text)
    task, training = parse([Task, TrainingArguments], ["--config", config, "--steps", "40", "--no_resume"], "")
    assert (training.learning_rate, training.steps, training.resume) == (1e-3, 40, False)
    assert (json.loads(task.options), task.plots) == ({"features": 2}, False)


def test_unknown_key_names_the_near_match(tmp_path):
    config = write(tmp_path / "c.yaml", "learning_rat: 1\n")
    with pytest.raises(ValueError, match="unknown argument 'learning_rat'; did you mean 'learning_rate'"):
        parse([TrainingArguments], ["--config", config], "")


def test_values_of_the_file_are_checked_like_flags(tmp_path, capsys):
    config = write(tmp_path / "c.yaml", "steps: many\n")
    with pytest.raises(SystemExit):
        parse([TrainingArguments], ["--config", config], "")
    assert "invalid int value: 'many'" in capsys.readouterr().err


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_mapping(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="must hold a mapping"):
        read_mapping(write(tmp_path / "list.yaml", "- 1\n"))
    with pytest.raises(ValueError, match="not valid YAML"):
        read_mapping(write(tmp_path / "broken.yaml", "a: [1\n"))
    with pytest.raises(ValueError, match="'steps' occurs twice"):
        read_mapping(write(tmp_path / "twice.yaml", "steps: 1\nseed: 2\nsteps: 3\n"))


def test_no_is_a_word(tmp_path):
    written = "mixed_precision: no\ncompile: true\nprogress: False\nsteps: 30\n"
    expected = {"mixed_precision": "no", "compile": True, "progress": False, "steps": 30}
    assert read_mapping(write(tmp_path / "c.yaml", written)) == expected
    (arguments,) = parse([TrainingArguments], ["--config", write(tmp_path / "d.yaml", written)], "")
    assert (arguments.mixed_precision, arguments.compile, arguments.progress) == ("no", True, False)


def test_negative_numbers_are_no_flags(tmp_path):
    with pytest.raises(ValueError, match="learning_rate must be above 0, got -0.001"):
        parse([TrainingArguments], ["--config", write(tmp_path / "c.yaml", "learning_rate: -1e-3\n")], "")


def test_to_flags():
    values = {"a": 1, "b": None, "c": [1, 2], "d": {"x": True}, "e": False}
    assert to_flags(values) == ["--a", "1", "--c", "1", "2", "--d", '{"x": true}', "--e", "False"]


def test_exponents_of_inner_mappings_are_numbers(tmp_path):
    text = "adapter_config: {threshold: 1e-3, lags: [1, 2], name: e-3, steps: [-2.5E4]}\n"
    flag, value = to_flags(read_mapping(write(tmp_path / "c.yaml", text)))
    assert flag == "--adapter_config"
    assert json.loads(value) == {"threshold": 1e-3, "lags": [1, 2], "name": "e-3", "steps": [-2.5e4]}
