"""Time what this package adds to a model: contenders take turns in one run, so that a busy machine is fair to all.

    python scripts/benchmark.py                                       # about twenty minutes on one core
    python scripts/benchmark.py --model llama-2048 --method lora_r8 lags_per_head --rounds 40
    python scripts/benchmark.py --model my/folder --dtype bfloat16 --length 64 --clock cpu

Suite "adapter": a training step (forward, backward, optimizer step) with an adapter, against the same model without
one and against LoRA. The models are a random two-layer Llama as wide as a 1B one, and SmolLM2-135M as
`scripts/fetch_assets.py` left it; --model takes any folder or Hub id. All contenders share one set of frozen
weights, and in all of them the embeddings' output requires a gradient (as `enable_input_require_grads` does for
gradient checkpointing): the base's backward goes through every layer too, although it has nothing to train and no
optimizer step. Without this, a base step would have no backward pass, and that of the others would end at the first
layer that trains.

A ratio is taken within each round and reported as the median over rounds with a bootstrapped 95 % interval.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from tqdm.auto import tqdm
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_sparsecoding  # noqa: F401  registers the adapter with peft
from hf_sparsecoding.reports import results, tables
from hf_sparsecoding.training.pretrained import load_model, read_adapter_config


CONFIGS = Path(__file__).parent / "configs" / "adapters"
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
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class BenchmarkArguments:
    """What is timed, and how."""

    suite: str = field(default="adapter", metadata={"help": "which set of contenders"})
    model: list[str] = field(
        default_factory=lambda: [*RANDOM_MODELS, FETCHED],
        metadata={"help": f"{', '.join(RANDOM_MODELS)} (random), {FETCHED} (fetched before), a folder or a Hub id"},
    )
    method: list[str] = field(
        default_factory=lambda: list(METHODS),
        metadata={"help": "names of scripts/configs/adapters, or PEFT configs as --adapter_config of adapt.py"},
    )
    dtype: list[str] = field(
        default_factory=lambda: native_dtypes(),
        metadata={
            "help": "default: float32, and bfloat16 where the CPU multiplies it natively (elsewhere it is very slow)"
        },
    )
    length: int = field(default=512, metadata={"help": "tokens per sequence"})
    batch_size: int = field(default=1, metadata={"help": "sequences per step"})
    rounds: int = field(default=20, metadata={"help": "steps of every contender that count"})
    warmup: int = field(default=2, metadata={"help": "steps of every contender before"})
    threads: int = field(default=1, metadata={"help": "threads of a tensor operation"})
    clock: str = field(
        default="wall", metadata={"help": "wall, or cpu: time on the CPU, for a machine that does other work as well"}
    )
    seed: int = field(default=0, metadata={"help": "seed of weights, tokens and the order in each round"})
    output_dir: str = field(default="outputs/benchmark", metadata={"help": "folder for results.json and the picture"})
    progress: bool = field(default=True, metadata={"help": "show a progress bar"})

    def __post_init__(self):
        for name, known in (("suite", SUITES), ("clock", CLOCKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("length", "batch_size", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {self.warmup}")


def native_dtypes() -> list[str]:
    return ["float32"] + ["bfloat16"] * torch.ops.mkldnn._is_mkldnn_bf16_supported()


# Any suite: turns and ratios


def take_turns(
    contenders: dict[str, Callable[[], None]], arguments: BenchmarkArguments, label: str
) -> dict[str, np.ndarray]:
    """Seconds [rounds] of each contender, called once a round in an order drawn anew."""
    clock, order = CLOCKS[arguments.clock], random.Random(arguments.seed)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = range(arguments.warmup + arguments.rounds)
    for _ in tqdm(rounds, desc=label, unit="round", disable=not arguments.progress):
        for name in order.sample(list(contenders), len(contenders)):
            start = clock()
            contenders[name]()
            seconds[name].append(clock() - start)
    return {name: np.array(values[arguments.warmup :]) for name, values in seconds.items()}


def median_ratio(seconds: np.ndarray, baseline: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Median over rounds of the ratio within a round, with its bootstrapped 95 % interval."""
    ratios = seconds / baseline
    draws = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


# Suite "adapter"


def adapter_suite(arguments: BenchmarkArguments) -> list[dict]:
    configs = adapter_configs(arguments.method)
    models = available_models(arguments.model)
    runs = []
    for name, source in models.items():
        for dtype in arguments.dtype:
            runs += time_adapters(name, source, dtype, configs, arguments)
    return runs


def adapter_configs(names: Iterable[str]) -> dict[str, PeftConfig]:
    """Configs by the label that their runs get."""
    configs = {}
    for name in names:
        file = CONFIGS / f"{name}.yaml"
        config = read_adapter_config(str(file) if file.is_file() else name)
        configs[config.peft_type.lower() if name.lstrip().startswith("{") else Path(name).stem] = config
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


def random_rows(arguments: BenchmarkArguments, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(vocabulary, (arguments.batch_size, arguments.length), generator=generator)
    ids[:, ROW_LENGTH - 1 :: ROW_LENGTH] = min(ROW_END, vocabulary - 1)
    return ids


def time_adapters(
    name: str, source: str, dtype: str, configs: dict[str, PeftConfig], arguments: BenchmarkArguments
) -> list[dict]:
    """One run per contender on one model in one data type."""
    base = make_model(source, dtype, arguments.seed).requires_grad_(False)
    input_ids = random_rows(arguments, base.config.vocab_size)
    models = {method: adapted(base, config) for method, config in {BASE: None, **configs}.items()}
    steps = {method: training_step(model, input_ids) for method, model in models.items()}
    seconds = take_turns(steps, arguments, f"{name} {dtype}")
    settings = {
        "model": name,
        "layers": base.config.num_hidden_layers,
        "hidden_size": base.config.hidden_size,
        "length": arguments.length,
        "batch": arguments.batch_size,
        "dtype": dtype,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
    }
    return [
        {
            "method": f"{method} ({name}, {dtype})",  # tables have a row per method
            "seed": arguments.seed,
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "samples": arguments.rounds * arguments.batch_size,
            "settings": {"adapter": method, **settings},
            "metrics": step_metrics(seconds, method, arguments.seed),
        }
        for method, model in models.items()
    ]


def step_metrics(seconds: dict[str, np.ndarray], method: str, seed: int) -> dict[str, float]:
    """Ratios with their intervals; spread is the interquartile range of the ratio to the base."""
    metrics = {"step_seconds": float(np.median(seconds[method]))}
    for baseline, name in ((BASE, "step_ratio_to_base"), (LORA, "step_ratio_to_lora")):
        if baseline in seconds:
            ratio, low, high = median_ratio(seconds[method], seconds[baseline], seed)
            metrics |= {name: ratio, f"{name}_low": low, f"{name}_high": high}
    low, high = np.quantile(seconds[method] / seconds[BASE], (0.25, 0.75))
    return {**metrics, "spread": float(high - low)}


def adapter_table(runs: list[dict]) -> str:
    def cell(metrics: dict, name: str) -> str:
        if name not in metrics:
            return tables.MISSING
        return f"{metrics[name]:.3f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"

    header = ["contender", "trainable", "step, s", "ratio to base", "ratio to LoRA"]
    rows = [
        [run["method"], f"{run['trainable_parameters']:,}", tables.number(run["metrics"]["step_seconds"])]
        + [cell(run["metrics"], name) for name in ("step_ratio_to_base", "step_ratio_to_lora")]
        for run in runs
    ]
    return tables.table(header, rows)


def adapter_picture(runs: list[dict], path: Path) -> None:
    """Ratio to the base with its interval, a panel per model and data type."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[dict]] = {}
    for run in runs:
        if run["settings"]["adapter"] != BASE:
            panels.setdefault(f"{run['settings']['model']}, {run['settings']['dtype']}", []).append(run)
    height = 1.8 + 0.3 * max(map(len, panels.values()), default=1)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), height), squeeze=False, layout="constrained"
    )
    for axis, (title, shown) in zip(axes[0], panels.items(), strict=True):
        for place, run in enumerate(shown):
            metrics = run["metrics"]
            bounds = (metrics["step_ratio_to_base_low"], metrics["step_ratio_to_base_high"])
            axis.plot(bounds, (place, place), color="#9aa5b1")
            axis.plot(metrics["step_ratio_to_base"], place, "o", color="#2a6f97")
        axis.axvline(1, color="#333333", linewidth=0.8)
        axis.set_yticks(range(len(shown)), [run["settings"]["adapter"] for run in shown])
        axis.invert_yaxis()
        axis.set(title=title, xlabel="step, ratio to frozen base")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


@dataclass(frozen=True)
class Suite:
    """An experiment of results.json: how to measure, print and draw it."""

    experiment: str
    measure: Callable[[BenchmarkArguments], list[dict]]
    table: Callable[[list[dict]], str]
    picture: Callable[[list[dict], Path], None]


SUITES = {"adapter": Suite("adapter-overhead", adapter_suite, adapter_table, adapter_picture)}


def main(arguments: BenchmarkArguments) -> dict:
    """Measure, print and write; the results as results.json holds them."""
    suite, output = SUITES[arguments.suite], Path(arguments.output_dir)
    torch.set_num_threads(arguments.threads)
    runs = suite.measure(arguments)
    written = results.new(suite.experiment, runs)
    results.write(output / results.FILE, written)
    print(suite.table(runs))
    print(f"wrote {output / results.FILE}")
    if find_spec("matplotlib") is None:
        print("no picture: pip install 'hf-sparsecoding[plots]'")
    else:
        suite.picture(runs, output / "step_ratio.png")
        print(f"wrote {output / 'step_ratio.png'}")
    return written


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses()
    main(parsed)
