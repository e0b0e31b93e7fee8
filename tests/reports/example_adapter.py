"""A saved adapter as a folder, made without a model, and results of the two kinds that its card is rendered from."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.reports.example_results import example_results, example_run


BASE_MODEL = "me/base"
CONFIG = {
    "peft_type": "SPARSECODING",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": BASE_MODEL,
    "inference_mode": True,
    "num_contexts": 2,
    "lags": [1, 2],
    "segment_token_ids": None,
}


def save_adapter(folder: Path, **config) -> Path:
    """An adapter of 2 layers x 4 heads x 2 contexts = 16 numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    name = "base_model.model.model.layers.{}.self_attn.sparsecoding_lambda.weight"
    weights = {name.format(layer): np.full((4, 2), layer, np.float32) for layer in range(2)}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def training_results(**settings) -> dict:
    """As scripts/adapt.py writes them: one run, before and after, groups."""
    run = example_run(metrics={**example_run()["metrics"], "train_loss": 1.5, "step_seconds": None})
    data = {"task": "s_raven_text", "data": "", "steps": 50, "model": BASE_MODEL}
    return example_results(runs=[{**run, "settings": {**run["settings"], **data, **settings}}])


def evaluation_results() -> dict:
    """As scripts/evaluate_commonsense.py writes them: the base model and adapters, each on the same tasks."""
    items = {"likelihood_easy": 400, "likelihood_very_easy": 100, "likelihood_mean": 320}

    def run(method: str, seed: int, shares: tuple[float, float], **more) -> dict:
        metrics = dict(zip(items, (*shares, sum(shares) / 2), strict=True))
        evaluation = {"tasks": ["easy", "very_easy"], "beams": 4}
        settings = {"base_model": BASE_MODEL, "items": items, "evaluation": evaluation}
        if method != "base":
            settings |= {"adapter_config": CONFIG, "training": {"steps": 50, "items": {}, "adapter_config": CONFIG}}
            metrics["train_loss"] = 1.5
        return {**example_run(method, seed, settings=settings, metrics=metrics), **more}

    paired = {
        "likelihood_easy": {"difference": 0.3, "p": 0.00012},
        "likelihood_mean": {"difference": 0.15, "low": -0.01, "high": 0.31},
    }
    runs = [run("base", 0, (0.4, 0.5)), run("lags", 0, (0.6, 0.5))]
    runs.append(run("lags", 1, (0.7, 0.5), against_base=paired, intervals={"likelihood_mean": [0.51, 0.69]}))
    return example_results(experiment="tasks", runs=runs)
