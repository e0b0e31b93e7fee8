"""The card of a published adapter: Hub metadata and Markdown, from adapter_config.json and results.json.

A metric `..._before...` is the base model's value of `..._after...`; other metrics are compared with those of the run
whose method is "base", if there is one. Metrics that `settings["items"]` gives a number of items for are shares: they
get 95 % intervals and a place in the model-index. What a run has of "intervals" and "against_base" (comparisons paired
by item) comes before what follows from the numbers of items.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import EvalResult, ModelCardData
from safetensors import safe_open

from .cards import directive
from .intervals import Difference, difference, wilson
from .results import by_method
from .tables import notes, number, table, with_verdict


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE, BEFORE, AFTER = "base", "_before", "_after"
OWN = "SPARSECODING"
# what a saved config holds beside the method's own fields
BOOKKEEPING = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")
METHOD = """It adds to each attention head's output that of its contexts, earlier tokens, with learned weights:
`Z_t = (1 + lambda_0) O_t + sum_i lambda_i O_{context_i(t)}`, the transfer of sparse-coding coefficients of
[arXiv 2511.20194](https://arxiv.org/abs/2511.20194). The base model's weights are unchanged."""
CITATION = """```bibtex
@inproceedings{chen2025sparsecoding,
  title     = {In-Context Compositional Learning via Sparse Coding Transformer},
  author    = {Chen, Wei and Yu, Jingxi and Miao, Zichen and Qiu, Qiang},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2025},
  note      = {arXiv:2511.20194}
}
```"""


def read_config(folder: str | Path) -> dict:
    """adapter_config.json of a saved adapter for a causal language model."""
    path = Path(folder) / CONFIG
    if not path.is_file() or not path.with_name(WEIGHTS).is_file():
        missing = WEIGHTS if path.is_file() else CONFIG
        raise ValueError(f"no adapter in {folder}: {missing} is missing; give the folder that save_pretrained wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise ValueError(f"{path} has no peft_type; give the folder of a PEFT adapter")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"{path}: task_type is {config['task_type']!r}; cards are for causal language models")
    return config


def count_numbers(folder: str | Path) -> int:
    """How many numbers a saved adapter holds."""
    with safe_open(Path(folder) / WEIGHTS, framework="numpy") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def choose_run(results: dict, config: dict, method: str = "", seed: int | None = None) -> dict:
    """The run that trained or evaluated the adapter with this config.

    Raises:
        ValueError: if it is not the only one of that method and seed, or says that it had another config.
    """
    runs = [
        run
        for run in results["runs"]
        if run["method"] != BASE
        and run["trainable_parameters"]  # other rows for comparison have none either
        and method in ("", run["method"])
        and seed in (None, run["seed"])
    ]
    if len(runs) != 1:
        known = ", ".join(f"{run['method']} (seed {run['seed']})" for run in runs or results["runs"])
        raise ValueError(f"{len(runs)} runs may be this adapter's, of: {known}; choose one with --method and --seed")
    given = runs[0]["settings"].get("adapter_config")
    for name, value in given.items() if isinstance(given, dict) else ():
        if name in config and name not in BOOKKEEPING and _plain(value) != _plain(config[name]):
            raise ValueError(
                f"the results are of another adapter: {name} is {value!r} in the run {runs[0]['method']!r} and "
                f"{config[name]!r} in the adapter; give the adapter's own results.json as --results"
            )
    return runs[0]


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, list) else value  # saved sets have no order


class Measured(NamedTuple):
    """A value of a metric; for shares also the number of items behind it and its 95 % interval."""

    value: float | None
    items: int | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.interval is None:
            return number(self.value)
        return f"{self.value:.3f} [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"


class Row(NamedTuple):
    """One metric of the adapter beside the base model's; `dataset` for shares only."""

    metric: str
    dataset: str | None
    base: Measured
    adapter: Measured
    change: str


def result_rows(results: dict, run: dict) -> list[Row]:
    metrics, bases = run["metrics"], by_method(results).get(BASE, [])
    rows = []
    for metric, value in metrics.items():
        if value is None or (BEFORE in metric and metric.replace(BEFORE, AFTER, 1) in metrics):
            continue
        before = metric.replace(AFTER, BEFORE, 1)
        if before != metric and before in metrics:
            name, base = metric.replace(AFTER, "", 1), _measured(run, before)
        else:
            name, base = metric, _measured(bases[0], metric) if bases else Measured(None)
        adapter = _measured(run, metric)
        dataset = None if adapter.items is None else _dataset(results, run, metric)
        rows.append(Row(name, dataset, base, adapter, _change(run, metric, base, adapter)))
    return rows


def _measured(run: dict, metric: str) -> Measured:
    value, items = run["metrics"].get(metric), run["settings"].get("items", {}).get(metric)
    if value is None or items is None:
        return Measured(value)
    return Measured(value, items, run.get("intervals", {}).get(metric) or wilson(value, items))


def _dataset(results: dict, run: dict, metric: str) -> str:
    """The task that the metric's name ends in, where several were evaluated, or the one data set."""
    settings = run["settings"]
    tasks = [task for task in settings.get("evaluation", {}).get("tasks", []) if metric.endswith(f"_{task}")]
    named = settings.get("task") or Path(settings.get("data") or results["experiment"]).name
    return max(tasks, key=len, default=named)


def _change(run: dict, metric: str, base: Measured, adapter: Measured) -> str:
    paired = run.get("against_base", {}).get(metric)
    if paired is not None and "p" in paired:
        return f"{paired['difference']:+.3f}, p = {paired['p']:.2g}"
    if paired is not None:
        return with_verdict(Difference(paired["difference"], paired["low"], paired["high"]))
    if base.items is None or adapter.items is None:
        return with_verdict(None)
    return with_verdict(difference([adapter.value], [base.value], min(base.items, adapter.items)))


@dataclass(frozen=True)
class AdapterCard:
    """What a card is rendered from; without `results` it says what the adapter's own files know.

    `base_model` is the base model's id on the Hub, `run` the adapter's own run in `results`, `revision` the branch
    that the adapter is on, if it is not main.
    """

    folder: Path
    repo_id: str
    base_model: str
    results: dict | None = None
    run: dict | None = None
    license: str = "apache-2.0"
    datasets: list[str] = field(default_factory=list)
    revision: str = ""

    @cached_property
    def config(self) -> dict:
        return read_config(self.folder)

    @property
    def own(self) -> bool:
        return self.config["peft_type"] == OWN

    def render(self) -> str:
        settings = self.run["settings"] if self.run else {}
        sections = {
            f"# {self.repo_id.split('/')[1]}": self._summary(),
            "## Use": self._use(),
            "## Results": self._results() if self.run else "",
            "## Data and protocol": "\n".join(_bullets(settings, leave_out=("adapter_config", "items", "note"))),
            "## Adapter": "\n".join(_bullets(self.config, leave_out=BOOKKEEPING)),
            "## Limits": self._limits(),
            "## Command": self._command() if self.run else "",
            "## Citation": CITATION if self.own else "",
        }
        text = "\n\n".join(f"{title}\n\n{body}" for title, body in sections.items() if body)
        return f"---\n{self.metadata().to_yaml()}\n---\n\n{text}\n"

    def metadata(self) -> ModelCardData:
        results = self._eval_results() if self.run else []
        return ModelCardData(
            model_name=self.repo_id.split("/")[1] if results else None,
            base_model=self.base_model,
            library_name="peft",
            license=self.license,
            pipeline_tag="text-generation",
            tags=["hf-sparsecoding", "sparse-coding", "attention"] if self.own else [self.config["peft_type"].lower()],
            datasets=self.datasets or None,
            eval_results=results or None,
        )

    def _eval_results(self) -> list[EvalResult]:
        rows = [row for row in result_rows(self.results, self.run) if row.dataset]
        names = [row.metric for row in rows]
        return [
            EvalResult(
                task_type="text-generation",
                dataset_type=row.dataset,
                dataset_name=row.dataset,
                metric_type=row.metric.removesuffix(f"_{row.dataset}"),
                metric_name=row.metric,
                metric_value=row.adapter.value,
            )
            for row in rows
            if not any(row.metric.startswith(f"{name}_") for name in names)  # groups of a metric: in the table only
        ]

    def _summary(self) -> str:
        base = f"[{self.base_model}](https://huggingface.co/{self.base_model})"
        numbers = count_numbers(self.folder)
        text = f"A PEFT adapter of type {self.config['peft_type']} for {base}: {numbers:,} trained numbers."
        return f"{text}\n\n{METHOD}" if self.own else text

    def _use(self) -> str:
        revision = f', revision="{self.revision}"' if self.revision else ""
        package, first = "peft transformers", ""
        if self.own:
            package, first = "hf-sparsecoding", "import hf_sparsecoding  # first: registers the method with peft\n"
        return f"""```bash
pip install {package}
```

```python
{first}from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{self.repo_id}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{self.base_model}")
inputs = tokenizer("1 2 3", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```"""

    def _results(self) -> str:
        rows = result_rows(self.results, self.run)
        cells = [[row.metric, number(row.adapter.items), row.base, row.adapter, row.change] for row in rows]
        text = "In brackets: 95 % intervals over the items; n.s.: the interval of the difference holds 0."
        if "against_base" in self.run:
            text += " p: McNemar's exact test on the items that both answered."
        pictures = directive("pictures", self.folder, self.results, str(self.folder))
        made = table(["metric", "items", "base model", "adapter", "difference"], cells)
        return "\n\n".join(filter(None, [made, text, pictures]))

    def _limits(self) -> str:
        limits = []
        if self.run:
            name = f"{self.run['method']}, seed {self.run['seed']}"
            limits.append(f"One run, {name}: the intervals do not cover other seeds.")
            limits += notes({"runs": [self.run]})
            measured_on = self.run["settings"].get("base_model") or self.run["settings"].get("model")
            if measured_on not in (None, self.base_model):
                limits.append(f"For the results, the base model was loaded from `{measured_on}`.")
        else:
            limits.append("No results were published with this adapter.")
        limits.append("What the base model gets wrong, and the terms of its license, hold here too.")
        if self.own:
            limits.append("It cannot be merged into the weights: no weight matrix moves outputs between tokens.")
        return "\n".join(f"- {limit}" for limit in limits)

    def _command(self) -> str:
        results = {**self.results, "command": self.run.get("command", self.results["command"])}
        return directive("run", self.folder, results, str(self.folder))


def _bullets(values: dict, leave_out: tuple[str, ...], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if name in leave_out or value in (None, "", [], {}):
            continue
        if isinstance(value, dict):
            lines += [f"{indent}- `{name}`:", *_bullets(value, leave_out, indent + "  ")]
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{indent}- `{name}`: {shown}")
    return lines
