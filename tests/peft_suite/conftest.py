"""Takes peft's own decoder tests from peft's source distribution and turns them on SparseCodingConfig.

Nothing of peft is kept here: the tests are those of the installed version, which pip downloads once, into the cache
folder. The suite parametrises its tests over two module-level lists, of configs and of models; they get new contents
before the tests are collected. `make test-peft` runs it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: every model is made here

from peft import __version__ as PEFT_VERSION
from transformers.utils import logging

from hf_sparsecoding import SparseCodingConfig
from scripts.fetch_assets import cache_folder, new_folder
from tests.tiny_models import tiny_model


TASK = {"task_type": "CAUSAL_LM"}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")

# segments are not here: they need token ids, and the suite also passes embeddings
CONFIGS = {
    "lags": {},
    "threshold": {
        "per_head": False,
        "target_coefficient": True,
        "coefficients": "thresholded_softmax",
        "threshold": 0.01,
        "train_threshold": True,
    },
}

NO_DELTA = "lambda weighs coefficients that depend on the input: no weight delta to merge, merging is refused"
PICKLE = "a pickled adapter is refused: tests/adapter/test_refusals.py"
LEFT_OUT = {
    "test_save_pretrained_pickle": PICKLE,
    "test_save_pretrained_selected_adapters_pickle": PICKLE,
    "test_merge_layers": NO_DELTA,
    "test_merge_layers_fp16": NO_DELTA,
    "test_merge_layers_is_idempotent": NO_DELTA,
    "test_merge_layers_multi": NO_DELTA,
    "test_merge_layers_nan": NO_DELTA,
    "test_safe_merge": NO_DELTA,
}

OUTCOME = pytest.StashKey[dict[str, int]]()


def peft_source() -> Path:
    """Folder with peft's tests as the package `peft_tests`."""
    folder = cache_folder() / f"peft-{PEFT_VERSION}"
    if folder.exists():
        return folder
    with new_folder(folder) as partial:
        # not --no-build-isolation: pip builds the metadata of a source distribution even to download it
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "peft"]
        pip += ["--quiet", "--dest", str(partial), f"peft=={PEFT_VERSION}"]
        if subprocess.run(pip).returncode:
            raise pytest.UsageError(f"pip could not download the source of peft {PEFT_VERSION}; see its message above")
        (archive,) = partial.glob("peft-*.tar.gz")
        shutil.unpack_archive(archive, partial)
        archive.unlink()
        (unpacked,) = partial.iterdir()
        (unpacked / "tests").rename(partial / "peft_tests")
        shutil.rmtree(unpacked)
        # the suite imports one class of diffusers, for an isinstance check that no decoder test passes
        (partial / "diffusers.py").write_text("class StableDiffusionPipeline: ...\n", encoding="utf-8")
    return folder


def pytest_configure(config):
    sys.path.append(str(peft_source()))  # last: a real diffusers comes first
    logging.disable_progress_bar()
    pytest.register_assert_rewrite("peft_tests")
    from peft_tests import test_decoder_models as suite

    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    models = [Path(folder.name) / f"tiny-random-{family}" for family in FAMILIES]
    for family, path in zip(FAMILIES, models, strict=True):
        tiny_model(family).save_pretrained(path)
    suite.PEFT_DECODER_MODELS_TO_TEST[:] = map(str, models)
    suite.ALL_CONFIGS[:] = [(SparseCodingConfig, {**TASK, **kwargs}) for kwargs in CONFIGS.values()]


def pytest_make_parametrize_id(config, val, argname):
    if argname == "model_id":
        return Path(val).name
    if argname == "config_kwargs":
        return next((name for name, kwargs in CONFIGS.items() if val == {**TASK, **kwargs}), None)
    return None


@pytest.hookimpl(tryfirst=True)  # before -k and -m
def pytest_collection_modifyitems(config, items):
    for suite in {item.cls for item in items}:
        if unknown := [name for name in LEFT_OUT if not hasattr(suite, name)]:
            raise pytest.UsageError(f"LEFT_OUT has names that peft {PEFT_VERSION} does not know: {', '.join(unknown)}")
    ours, left_out, other_methods = [], [], []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("config_cls") is not SparseCodingConfig:
            other_methods.append(item)  # the suite also has tests of LoRA, prompt tuning, ... alone
        elif item.originalname in LEFT_OUT:
            left_out.append(item)
        else:
            ours.append(item)
    config.hook.pytest_deselected(items=left_out + other_methods)
    items[:] = ours
    config.stash[OUTCOME] = {"deselected by name": len(left_out), "of other methods": len(other_methods)}


def pytest_terminal_summary(terminalreporter, config):
    results = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    counts = {name: count for name, count in results.items() if count} | config.stash.get(OUTCOME, {})
    terminalreporter.section(f"peft {PEFT_VERSION}'s decoder tests on SparseCodingConfig")
    terminalreporter.line(" / ".join(f"{count} {name}" for name, count in counts.items()))
    for reason in dict.fromkeys(LEFT_OUT.values()):
        names = ", ".join(name for name in LEFT_OUT if LEFT_OUT[name] == reason)
        terminalreporter.line(f"left out: {names} ({reason})")
