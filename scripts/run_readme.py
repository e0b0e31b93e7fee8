"""Run the README's examples on the real model and keep what they print for the README.

python scripts/run_readme.py --model "$(python scripts/fetch_assets.py | tail -n 1)"
python scripts/render_cards.py
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from hf_sparsecoding.reports.readme import run_examples
from hf_sparsecoding.reports.results import write_text


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass
class ReadmeArguments:
    """Where the examples and their model are."""

    model: str = field(default=HUB_ID, metadata={"help": f"folder of {HUB_ID}, or its Hub id"})
    readme: str = field(default="README.md", metadata={"help": "file with the examples"})
    output: str = field(default="model_cards/readme", metadata={"help": "folder for what they print"})


def main(arguments: ReadmeArguments) -> None:
    text = Path(arguments.readme).read_text(encoding="utf-8")
    output = Path(arguments.output).resolve()
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).is_dir() else arguments.model
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:  # the examples save adapters
        os.chdir(scratch)
        try:
            printed = run_examples(text, {HUB_ID: model})
        finally:
            os.chdir(here)
    for name, lines in printed.items():
        if lines:
            shown = lines.replace(model, HUB_ID)
            write_text(output / f"{name}.md", f"```text\n{shown}\n```\n")
            print(f"wrote {output / f'{name}.md'}")


if __name__ == "__main__":
    main(HfArgumentParser(ReadmeArguments).parse_args_into_dataclasses()[0])
