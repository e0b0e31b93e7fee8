"""Time what this package adds to a model: contenders take turns in one run, so that a busy machine is fair to all.

    python scripts/benchmark.py                                       # about twenty minutes on one core
    python scripts/benchmark.py --model llama-2048 --method lora_r8 lags_per_head --rounds 40
    python scripts/benchmark.py --model my/folder --dtype bfloat16 --length 64 --clock cpu
    python scripts/benchmark.py --suite mixers                        # about two minutes on one core
    python scripts/benchmark.py --suite attention --length 512 2048   # minutes

Suite "adapter": a training step (forward, backward, optimizer step) with an adapter, against the same model without
one and against LoRA. The models are a random two-layer Llama as wide as a 1B one, and SmolLM2-135M as
`scripts/fetch_assets.py` left it; --model takes any folder or Hub id. All contenders share one set of frozen weights,
and the base's backward goes through every layer too: see `hf_sparsecoding/benchmarks/adapter.py`.

Suite "mixers": a training step of the small SparseTransformer on S-RAVEN with each mixer, without and with transfer of
the coefficients, against softmax and against the same mixer without transfer. Both are timed whatever --method names.

Suite "attention": forward and training of attention with thresholded coefficients, against torch's SDPA, explicit
matrices of coefficients and, if it is installed, entmax; also where only a share (--density) of the tiles of
coefficients holds any. With peak memory. On a GPU it takes the kernels in bfloat16, 4k to 16k tokens, against
FlashAttention, FlexAttention and, if they are installed, AdaSplash (adasplash) and native sparse attention
(flash-linear-attention); contenders that are absent are named:

    python scripts/benchmark.py --suite attention                     # the first call of each kernel tunes it

A ratio is taken within each round and reported as the median over rounds with a bootstrapped 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import HfArgumentParser

from hf_sparsecoding.benchmarks import adapter, attention, mixers
from hf_sparsecoding.benchmarks.turns import Turns
from hf_sparsecoding.reports import results


DTYPES = ("float32", "bfloat16", "float16")
CONFIGS = Path(__file__).parent / "configs" / "adapters"


@dataclass(frozen=True)
class Suite:
    """An experiment of results.json: its own options, how to measure, print and draw it."""

    experiment: str
    defaults: Callable[[], dict]
    measure: Callable[..., list[dict]]
    table: Callable[[list[dict]], str]
    picture: Callable[[list[dict], Path], None]
    uses_gpu: bool = False


SUITES = {
    "adapter": Suite(
        "adapter-overhead",
        adapter.defaults,
        partial(adapter.measure, folder=CONFIGS),
        adapter.table,
        adapter.picture,
    ),
    "attention": Suite(
        "kernels", attention.defaults, attention.measure, attention.table, attention.picture, uses_gpu=True
    ),
    "mixers": Suite("sparse-transformer-throughput", mixers.defaults, mixers.measure, mixers.table, mixers.picture),
}
OPTIONS = (
    "model",
    "method",
    "dtype",
    "length",
    "density",
    "head_dim",
    "batch_size",
    "compile",
)  # of one suite or another


@dataclass(frozen=True, kw_only=True)
class BenchmarkArguments(Turns):
    """What is timed, and how. An option that is None takes the suite's default."""

    suite: str = field(default="adapter", metadata={"help": "which set of contenders: adapter, attention, mixers"})
    model: list[str] | None = field(
        default=None,
        metadata={
            "help": f"adapter: {', '.join(adapter.RANDOM_MODELS)} (random), {adapter.FETCHED} (fetched before), "
            "a folder or a Hub id"
        },
    )
    method: list[str] | None = field(
        default=None,
        metadata={
            "help": "adapter: names of scripts/configs/adapters, or PEFT configs as --adapter_config of adapt.py; "
            f"mixers: {', '.join(mixers.METHODS)}; attention: {', '.join(attention.CONTENDERS)}"
        },
    )
    dtype: list[str] | None = field(
        default=None,
        metadata={
            "help": "adapter: float32, and by default bfloat16 too where the CPU multiplies it natively (elsewhere it "
            "is very slow)"
        },
    )
    length: list[int] | None = field(
        default=None, metadata={"help": "tokens per sequence; adapter: one (512), attention: any number of them"}
    )
    density: list[float] | None = field(
        default=None, metadata={"help": "attention: shares of tiles that hold a coefficient, 1 for random scores"}
    )
    head_dim: list[int] | None = field(default=None, metadata={"help": "attention: sizes of a head"})
    batch_size: int | None = field(default=None, metadata={"help": "samples per step (adapter: 1, mixers: 128)"})
    compile: bool | None = field(
        default=None, metadata={"help": "mixers: torch.compile all contenders", "nargs": "?", "const": True}
    )
    output_dir: str = field(default="outputs/benchmark", metadata={"help": "folder for results.json and the picture"})

    def __post_init__(self):
        super().__post_init__()
        if self.suite not in SUITES:
            raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {self.suite!r}")
        known = SUITES[self.suite].defaults()
        for name in OPTIONS:
            value = getattr(self, name)
            if value is not None and name not in known:
                raise ValueError(f"{name} does not apply to suite {self.suite!r} (it has {', '.join(known)})")
        for name, values in (
            ("length", self.length or []),
            ("head_dim", self.head_dim or []),
            ("batch_size", [] if self.batch_size is None else [self.batch_size]),
        ):
            if min(values, default=1) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(values)}")
        for name in self.dtype or []:
            if name not in DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
        if self.suite == "adapter" and len(self.length or [1]) > 1:
            raise ValueError(f"suite 'adapter' takes one length, got {self.length}")

    def options(self) -> dict:
        """The suite's own options, as given or by default."""
        given = {name: getattr(self, name) for name in OPTIONS}
        return {
            name: default if given[name] is None else given[name]
            for name, default in SUITES[self.suite].defaults().items()
        }


def main(arguments: BenchmarkArguments) -> dict:
    """Measure, print and write; the results as results.json holds them."""
    suite, output = SUITES[arguments.suite], Path(arguments.output_dir)
    torch.set_num_threads(arguments.threads)
    runs = suite.measure(arguments, **arguments.options())
    device = torch.cuda.get_device_name() if suite.uses_gpu and torch.cuda.is_available() else "CPU"
    written = results.new(suite.experiment, runs, device=device)
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
