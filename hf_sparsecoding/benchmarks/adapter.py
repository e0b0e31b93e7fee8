"""Suite "adapter": a training step (forward, backward, optimizer step) with an adapter, against the same model without
one and against LoRA.

All contenders share one set of frozen weights, and in all of them the embeddings' output requires a gradient (as
`enable_input_require_grads` does for gradient checkpointing): the base's backward goes through every layer too,
although it has nothing to train and no optimizer step. Without this, a base step would have no backward pass, and that
of the others would end at the first layer that trains.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..reports import tables
from ..training.pretrained import adapter_label, load_model, read_adapter_config
from .turns import Turns, draw_ratios, ratio_cell, ratio_metrics, take_turns


BASE, LORA = "base", "lora_r8"
METHODS = (LORA, "lags_per_head", "lags_per_layer", "lags_per_head_target", "segments")

# a small vocabulary keeps the output layer from hiding the layers that adapters change
RANDOM_MODELS = {
    "llama-2048": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 1024,
    }
}
FETCHED = "SmolLM2-135M-Instruct"

ROW_END, ROW_LENGTH = 198, 16  # the input has rows for adapters with segments: 198 is what segments.yaml cuts at


def defaults() -> dict:
    """The suite's own options."""
    return {
        "model": [*RANDOM_MODELS, FETCHED],
        "method": list(METHODS),
        "dtype": native_dtypes(),
        "length": [512],
        "batch_size": 1,
    }


def native_dtypes() -> list[str]:
    """float32, and bfloat16 where the CPU multiplies it natively: elsewhere it is very slow."""
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return ["float32"] + ["bfloat16"] * native


def measure(
    turns: Turns,
    *,
    model: Iterable[str],
    method: Iterable[str],
    dtype: Iterable[str],
    length: list[int],
    batch_size: int,
    folder: Path,
) -> list[dict]:
    """Runs as results.json holds them; `folder` has the configs that `method` names."""
    configs = adapter_configs(method, folder)
    runs = []
    for name, source in available_models(model).items():
        for precision in dtype:
            runs += time_adapters(name, source, precision, configs, (batch_size, *length), turns)
    return runs


def adapter_configs(names: Iterable[str], folder: Path) -> dict[str, PeftConfig]:
    """Configs by the label that their runs get."""
    configs = {}
    for name in names:
        file = folder / f"{name}.yaml"
        config = read_adapter_config(str(file) if file.is_file() else name)
        configs[adapter_label(name)] = config
    return configs


def available_models(names: Iterable[str]) -> dict[str, str]:
    """Label and source of each model; the fetched one is left out, with a word, where it was not fetched."""
    models = {}
    for name in names:
        if name != FETCHED:
            models[Path(name).name] = name
            continue
        folder = Path(os.environ.get("HF_SPARSECODING_CACHE") or "~/.cache/hf_sparsecoding").expanduser() / FETCHED
        if folder.is_dir():
            models[name] = str(folder)
        else:
            print(
                f"{name} is left out: python scripts/fetch_assets.py gets it, or give --model a folder",
                file=sys.stderr,
            )
    if not models:
        raise ValueError("no model to time; run python scripts/fetch_assets.py, or give --model a folder")
    return models


def make_model(source: str, dtype: str, seed: int) -> PreTrainedModel:
    if source not in RANDOM_MODELS:
        return load_model(source, dtype)
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**RANDOM_MODELS[source])).to(getattr(torch, dtype))


def adapted(base: PreTrainedModel, config: PeftConfig | None) -> torch.nn.Module:
    """The base with an adapter (None: as it is), sharing its weights."""
    shared = {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
    model = copy.deepcopy(base, shared)
    model.enable_input_require_grads()
    return (model if config is None else get_peft_model(model, config)).train()


def training_step(model: torch.nn.Module, input_ids: torch.Tensor) -> Callable[[], None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3) if trainable else None

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def random_rows(shape: tuple[int, int], vocabulary: int, seed: int) -> torch.Tensor:
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    ids[:, ROW_LENGTH - 1 :: ROW_LENGTH] = min(ROW_END, vocabulary - 1)
    return ids


def time_adapters(
    name: str, source: str, dtype: str, configs: dict[str, PeftConfig], shape: tuple[int, int], turns: Turns
) -> list[dict]:
    """One run per contender on one model in one data type; `shape` is (sequences, tokens)."""
    base = make_model(source, dtype, turns.seed).requires_grad_(False)
    input_ids = random_rows(shape, base.config.vocab_size, turns.seed)
    models = {method: adapted(base, config) for method, config in {BASE: None, **configs}.items()}
    steps = {method: training_step(model, input_ids) for method, model in models.items()}
    seconds = take_turns(steps, turns, f"{name} {dtype}")
    batch, length = shape
    settings = {
        "model": name,
        "layers": base.config.num_hidden_layers,
        "hidden_size": base.config.hidden_size,
        "length": length,
        "batch": batch,
        "dtype": dtype,
        "threads": turns.threads,
        "rounds": turns.rounds,
        "clock": turns.clock,
    }
    return [
        {
            "method": f"{method} ({name}, {dtype})",  # tables have a row per method
            "seed": turns.seed,
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "samples": turns.rounds * batch,
            "settings": {"adapter": method, **settings},
            "metrics": step_metrics(seconds, method, batch * length, turns.seed),
        }
        for method, model in models.items()
    ]


def step_metrics(seconds: dict[str, np.ndarray], method: str, tokens: int, seed: int) -> dict[str, float]:
    """Ratios with their intervals; spread is the interquartile range of the ratio to the base."""
    median = float(np.median(seconds[method]))
    metrics = {"step_seconds": median, "tokens_per_second": tokens / median}
    for baseline, name in ((BASE, "step_ratio_to_base"), (LORA, "step_ratio_to_lora")):
        if baseline in seconds:
            metrics |= ratio_metrics(name, seconds[method], seconds[baseline], seed)
    low, high = np.quantile(seconds[method] / seconds[BASE], (0.25, 0.75))
    return {**metrics, "spread": float(high - low)}


def table(runs: list[dict]) -> str:
    header = ["contender", "trainable", "step, s", "tokens / s", "ratio to base", "ratio to LoRA"]
    rows = [
        [run["method"], f"{run['trainable_parameters']:,}"]
        + [tables.number(run["metrics"][name]) for name in ("step_seconds", "tokens_per_second")]
        + [ratio_cell(run["metrics"], name) for name in ("step_ratio_to_base", "step_ratio_to_lora")]
        for run in runs
    ]
    return tables.table(header, rows)


def picture(runs: list[dict], path: Path) -> None:
    """Ratio to the base with its interval, a panel per model and data type."""
    panels: dict[str, list[tuple[str, dict]]] = {}
    for run in runs:
        settings = run["settings"]
        if settings["adapter"] != BASE:
            shown = panels.setdefault(f"{settings['model']}, {settings['dtype']}", [])
            shown.append((settings["adapter"], run["metrics"]))
    draw_ratios(panels, "step_ratio_to_base", "step, ratio to frozen base", path)
