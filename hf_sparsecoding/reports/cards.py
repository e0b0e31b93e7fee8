"""Model cards and README blocks, rendered from results.json: no number is typed twice.

A card's text is `model_cards/<experiment>/card.md`: Markdown with directives in double braces, where METRIC and
METHOD are names of the folder's results.json:

    {{run}}                                   command, date, versions, machine
    {{commands}}                              the command of every run, where a sweep made them
    {{table METRIC ... [vs=METHOD]}}          one row per method; with vs, differences from that one
    {{cross PREFIX METRIC}}                   rows and columns of the methods named "PREFIX, ROW, COLUMN"
    {{cross "" METRIC}}                       the same of those named "ROW, COLUMN"
    {{difference METHOD METHOD METRIC}}       the first minus the second, with its 95 % interval
    {{accuracies PROTOCOL}}                   commonsense accuracies by task, with intervals and tests
    {{value METHOD METRIC}}                   mean ± spread of one metric
    {{matrix TABLE}}, {{refusals}}            the compatibility matrix, and what cannot be adapted
    {{notes}}                                 what runs say about themselves (cut short, ...)
    {{pictures}}                              every .png of the folder

Names with spaces stand in quotes. A folder without card.md gets the text in `DEFAULT`. In other files (the README), a
block between `<!-- generated:NAME -->` and `<!-- /generated -->` holds `model_cards/NAME.md`, and
`<!-- generated:EXPERIMENT table METRIC ... -->` holds that directive of an experiment.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from . import results as results_io
from .compatibility import matrix, refusals
from .tables import accuracy_table, compare, cross_table, method_table, metric_values, notes, with_spread


TEMPLATE, CARD, RESULTS = "card.md", "README.md", "results.json"
DIRECTIVE = re.compile(r"\{\{([^{}]*)\}\}")
BLOCK = re.compile(r"(<!-- generated:(?P<name>\S+)(?P<directive>[^\n]*?) -->\n).*?(<!-- /generated -->)", re.S)
DEFAULT = """# {{experiment}}

{{run}}

## Results

{{table}}

{{notes}}

{{pictures}}

## Limits

Measured with the seeds, items and steps given above, on one machine; spreads are standard deviations over seeds.
"""


def render_card(folder: str | Path) -> str:
    """The text of `<folder>/README.md`."""
    folder = Path(folder)
    results = results_io.load(folder / RESULTS)
    template = folder / TEMPLATE
    text = template.read_text(encoding="utf-8") if template.is_file() else DEFAULT
    source = str(template if template.is_file() else folder / RESULTS)
    rendered = DIRECTIVE.sub(lambda match: directive(match.group(1).strip(), folder, results, source), text)
    # an empty directive leaves no hole
    return re.sub(r"\n{3,}", "\n\n", rendered).rstrip() + "\n"


def directive(text: str, folder: Path, results: dict, source: str) -> str:
    name, *arguments = shlex.split(text)
    if name not in DIRECTIVES:
        raise ValueError(f"{source}: unknown directive {text!r}; known: {', '.join(sorted(DIRECTIVES))}")
    try:
        return DIRECTIVES[name](folder, results, arguments)
    except ValueError as error:
        raise ValueError(f"{source}: {{{{{text}}}}}: {error}") from error


def _experiment(folder: Path, results: dict, arguments: list[str]) -> str:
    return results["experiment"]


def _run(folder: Path, results: dict, arguments: list[str]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return f"```bash\n{results['command']}\n```\n\nRun on {results['date']} with {packages}; {results['machine']}."


def _commands(folder: Path, results: dict, arguments: list[str]) -> str:
    commands = [run["command"] for run in results["runs"] if "command" in run]
    return "```bash\n" + "\n".join(commands) + "\n```" if commands else ""


def _table(folder: Path, results: dict, arguments: list[str]) -> str:
    baselines = [argument.removeprefix("vs=") for argument in arguments if argument.startswith("vs=")]
    metrics = [argument for argument in arguments if not argument.startswith("vs=")]
    # without names: the metrics that every run has
    shared = [name for name in results["runs"][0]["metrics"] if all(name in run["metrics"] for run in results["runs"])]
    return method_table(results, metrics or shared, baselines[0] if baselines else None)


def _cross(folder: Path, results: dict, arguments: list[str]) -> str:
    if len(arguments) != 2:
        raise ValueError(f"cross needs PREFIX METRIC, got {arguments}")
    return cross_table(results, *arguments)


def _difference(folder: Path, results: dict, arguments: list[str]) -> str:
    if len(arguments) != 3:
        raise ValueError(f"difference needs METHOD METHOD METRIC, got {arguments}")
    methods = results_io.by_method(results)
    *names, metric = arguments
    for name in names:
        if not metric_values(methods.get(name, []), metric):
            raise ValueError(f"no metric {metric!r} of method {name!r}; methods: {', '.join(methods)}")
    return compare(*(methods[name] for name in names), metric)


def _accuracies(folder: Path, results: dict, arguments: list[str]) -> str:
    if len(arguments) != 1:
        raise ValueError(f"accuracies needs one PROTOCOL, got {arguments}")
    evaluation = results["runs"][0]["settings"].get("evaluation", {"protocols": [], "tasks": []})
    if arguments[0] not in evaluation["protocols"]:
        raise ValueError(
            f"no protocol {arguments[0]!r} in {results['experiment']}; known: {', '.join(evaluation['protocols'])}"
        )
    return accuracy_table(results["runs"], arguments[0], evaluation["tasks"])


def _value(folder: Path, results: dict, arguments: list[str]) -> str:
    if len(arguments) != 2:
        raise ValueError(f"value needs METHOD METRIC, got {arguments}")
    method, metric = arguments
    methods = results_io.by_method(results)
    values = metric_values(methods.get(method, []), metric)
    if not values:
        raise ValueError(f"no metric {metric!r} of method {method!r}; methods: {', '.join(methods)}")
    return with_spread(values)


def _notes(folder: Path, results: dict, arguments: list[str]) -> str:
    return "\n".join(f"- {note}" for note in notes(results))


def _pictures(folder: Path, results: dict, arguments: list[str]) -> str:
    names = sorted(path.name for path in folder.glob("*.png"))
    return "\n\n".join(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in names)


DIRECTIVES = {
    "experiment": _experiment,
    "run": _run,
    "commands": _commands,
    "table": _table,
    "cross": _cross,
    "difference": _difference,
    "accuracies": _accuracies,
    "value": _value,
    "matrix": matrix,
    "refusals": refusals,
    "notes": _notes,
    "pictures": _pictures,
}


def render_blocks(text: str, cards: str | Path, source: str) -> str:
    """`text` with every generated block filled anew from the folder `cards`."""
    cards = Path(cards)
    if text.count("<!-- generated:") != len(BLOCK.findall(text)):
        raise ValueError(f"{source}: a generated block is not closed; end it with <!-- /generated --> on its own line")

    def fill(match: re.Match) -> str:
        name, wanted = match["name"], match["directive"].strip()
        if wanted:
            folder = cards / name
            body = directive(wanted, folder, results_io.load(folder / RESULTS), f"{source}: block {name!r}")
        else:
            file = cards / f"{name}.md"
            if not file.is_file():
                raise ValueError(f"{source}: block {name!r} needs {file}, which does not exist")
            body = file.read_text(encoding="utf-8").strip()
        return f"{match[1]}{body}\n{match[4]}"

    return BLOCK.sub(fill, text)


def render_all(cards: str | Path, readme: str | Path) -> dict[Path, str]:
    """What every card and the README should hold: {file: text}."""
    cards, readme = Path(cards), Path(readme)
    texts = {path.parent / CARD: render_card(path.parent) for path in sorted(cards.glob(f"*/{RESULTS}"))}
    if readme.is_file():
        texts[readme] = render_blocks(readme.read_text(encoding="utf-8"), cards, str(readme))
    return texts
