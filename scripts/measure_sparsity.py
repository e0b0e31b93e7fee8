"""Threshold the softmax coefficients of a language model: how many vanish, and what does it cost in perplexity?

    python scripts/measure_sparsity.py --model HuggingFaceTB/SmolLM2-135M-Instruct --thresholds 0 1e-4 1e-3 1e-2
    python scripts/measure_sparsity.py --model MODEL_FOLDER --text FILE --length 1024 --windows 8

Without --text, the text is the help on topics that every Python carries (`pydoc_data.topics`). Coefficients become
prox_xi(softmax(S)) in all layers, nothing is trained. `element_zeros` and `tile_zeros` are shares of what causality
allows: of coefficients, and of tiles of 128 x 128 of them, which kernels can leave out.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data import topics

import torch
from peft import get_peft_model

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.evaluation.coefficient_sparsity import measure, windows
from hf_sparsecoding.ops.attention_cpu import TILE
from hf_sparsecoding.reports import results, tables
from hf_sparsecoding.training.command_line import parse
from hf_sparsecoding.training.pretrained import DTYPES, load_model, load_tokenizer
from hf_sparsecoding.training.runs import device_name


SHOWN = ("perplexity", "perplexity_ratio", "element_zeros", "tile_zeros", "sparsest_head_tile_zeros")


@dataclass(frozen=True)
class SparsityArguments:
    model: str = field(default="", metadata={"help": "model: a folder or an id of the Hub"})
    dtype: str = field(default="float32", metadata={"help": f"data type: {', '.join(DTYPES)}"})
    text: str = field(default="", metadata={"help": "text file; default: the help topics of Python"})
    thresholds: list[float] = field(
        default_factory=lambda: [0.0, 3e-5, 1e-4, 3e-4, 1e-3], metadata={"help": "xi, the same in all heads"}
    )
    length: int = field(default=2048, metadata={"help": "tokens per window"})
    windows: int = field(default=4, metadata={"help": "windows of the text, end to end from its start"})
    output_dir: str = field(default="outputs/coefficient_sparsity", metadata={"help": "folder for results.json"})
    experiment: str = field(default="coefficient-sparsity", metadata={"help": "name of the experiment in the results"})
    progress: bool = field(default=True, metadata={"help": "show progress bars"})

    def __post_init__(self):
        if not self.model:
            raise ValueError("--model is missing: a folder or an id of the Hub")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.length < 2 or self.windows < 1:
            raise ValueError(f"need length >= 2 and windows >= 1, got {self.length} and {self.windows}")
        if not self.thresholds or not all(0 <= xi < 1 for xi in self.thresholds):
            raise ValueError(f"thresholds must be between 0 and 1, like softmax's coefficients, got {self.thresholds}")


def read_text(path: str) -> str:
    if not path:
        return "\n".join(topics.topics[name] for name in sorted(topics.topics))
    if not Path(path).is_file():
        raise ValueError(f"--text {path!r} is no file")
    return Path(path).read_text(encoding="utf-8")


def run(arguments: SparsityArguments) -> list[dict]:
    """One run per threshold, as results.json holds them; perplexities are compared with the first one's."""
    tokens = load_tokenizer(arguments.model)(read_text(arguments.text), verbose=False)["input_ids"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = windows(tokens, arguments.length, arguments.windows).to(device)
    runs = []
    for xi in arguments.thresholds:
        base = load_model(arguments.model, arguments.dtype, attn_implementation="eager")
        config = SparseCodingConfig(num_contexts=1, coefficients="thresholded_softmax", threshold=xi)
        model = get_peft_model(base, config).to(device)  # lambda is 0: nothing is transferred
        found = measure(model, inputs, arguments.progress)
        perplexity = math.exp(found.loss)
        first = runs[0]["metrics"]["perplexity"] if runs else perplexity
        metrics = {
            "perplexity": perplexity,
            "perplexity_ratio": perplexity / first,
            "element_zeros": found.elements.mean().item(),
            "tile_zeros": found.tiles.mean().item(),
            "sparsest_head_tile_zeros": found.tiles.max().item(),
        }
        metrics |= {f"tile_zeros_layer_{i}": share for i, share in enumerate(found.tiles.mean(1).tolist())}
        settings = {name: value for name, value in asdict(arguments).items() if name not in ("thresholds", "progress")}
        runs.append(
            {
                "method": f"xi = {xi:g}",
                "seed": 0,
                "trainable_parameters": 0,
                "samples": arguments.windows,
                "settings": {**settings, "threshold": xi, "tile": TILE, "tokens": inputs.numel()},
                "metrics": metrics,
            }
        )
        print(f"xi = {xi:g}: " + ", ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN), flush=True)
    return runs


def main(argv: list[str] | None = None) -> int:
    (arguments,) = parse([SparsityArguments], sys.argv[1:] if argv is None else argv, __doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = results.new(arguments.experiment, run(arguments), device=device_name(device))
    path = Path(arguments.output_dir) / results.FILE
    results.write(path, found)
    print(tables.method_table(found, SHOWN))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
