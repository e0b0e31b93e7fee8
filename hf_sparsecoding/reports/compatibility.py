"""The compatibility matrix as tables: what works (rows) with what (columns), and what is refused and why.

Its results.json is written by the tests (`pytest --compatibility=FILE`): a run per row, whose metrics are 1 where a
test passed, 0 where it failed and null where it does not apply; `settings["table"]` names the table of the row.
"""

from __future__ import annotations

from pathlib import Path

from .tables import table


MARKS = {1: "✓", 0: "✗", None: "–"}
REFUSED = "refused"


def matrix(folder: Path, results: dict, arguments: list[str]) -> str:
    """The directive `matrix TABLE`: one row per run of the table, one column per check."""
    if len(arguments) != 1:
        raise ValueError(f"matrix needs the name of one table, got {arguments}")
    (name,) = arguments
    runs = _runs(results, name)
    checks = list(dict.fromkeys(check for run in runs for check in run["metrics"]))
    for run in runs:
        if missing := [check for check in checks if check not in run["metrics"]]:
            raise ValueError(
                f"{run['method']} was not tested for {', '.join(missing)}; run the whole command: {results['command']}"
            )
    rows = [[run["method"], *(MARKS[run["metrics"][check]] for check in checks)] for run in runs]
    return table(["", *checks], rows)


def refusals(folder: Path, results: dict, arguments: list[str]) -> str:
    """The directive `refusals`: what cannot be adapted, with the error that it raises."""
    runs = _runs(results, REFUSED)
    if failed := [run["method"] for run in runs if run["metrics"].get(REFUSED) != 1]:
        raise ValueError(f"not refused as they should be: {', '.join(failed)}")
    return "\n".join(f"- `{run['method']}`: {run['settings']['reason']}" for run in runs)


def _runs(results: dict, name: str) -> list[dict]:
    runs = [run for run in results["runs"] if run["settings"].get("table") == name]
    if not runs:
        known = dict.fromkeys(str(run["settings"].get("table")) for run in results["runs"])
        raise ValueError(f"no table {name!r} in {results['experiment']}; known: {', '.join(known)}")
    return runs
