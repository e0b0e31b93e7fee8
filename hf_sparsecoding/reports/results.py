"""results.json: what a command measured, with everything needed to measure it again.

{"experiment", "command", "date", "versions": {package: version}, "machine", "runs": [
    {"method", "seed", "trainable_parameters", "samples", "settings": {...}, "metrics": {name: number}}]}

Shares are between 0 and 1, times in seconds. A run that was cut short says so in `settings["note"]`. A run of a sweep
also has its own "command".
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


FILE = "results.json"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets", "hf-sparsecoding")
TOP = {"experiment": str, "command": str, "date": str, "versions": dict, "machine": str, "runs": list}
RUN = {"method": str, "seed": int, "trainable_parameters": int, "samples": int, "settings": dict, "metrics": dict}


def new(experiment: str, runs: list[dict], command: str | None = None, device: str = "CPU") -> dict:
    """Results measured here and now; `device` names what computed them."""
    return {
        "experiment": experiment,
        "command": command or command_line(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": f"{os.cpu_count()} cores, {device}",
        "runs": runs,
    }


def command_line() -> str:
    """The command that runs now, as one would type it in the project's folder."""
    script = Path(sys.argv[0])
    if script.is_absolute() and script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return shlex.join(["python", str(script), *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # reports run without the packages that only training needs
            continue
    return found


def validate(results: object, source: str) -> dict:
    """The same results, or a ValueError that says what is wrong where."""
    _check_fields(results, TOP, source)
    if not results["runs"]:
        raise ValueError(f"{source}: runs is empty; run the experiment's command first")
    for number, run in enumerate(results["runs"]):
        place = f"{source}: runs[{number}]"
        _check_fields(run, RUN, place)
        for name, value in run["metrics"].items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{place}: metric {name!r} must be a number or null, got {value!r}")
    return results


def _check_fields(value: object, fields: dict[str, type], place: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object, got {type(value).__name__}")
    for name, kind in fields.items():
        if name not in value:
            raise ValueError(f"{place} lacks {name!r}; it has {', '.join(value) or 'nothing'}")
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"{place}: {name!r} must be {kind.__name__}, got {value[name]!r}")


def load(path: str | Path) -> dict:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}; run the experiment's command first")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    return validate(content, str(path))


def write(path: str | Path, results: dict) -> None:
    """Write results in one step, so that a reader never sees half of them."""
    write_text(path, json.dumps(validate(results, str(path)), indent=2, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def other_versions(part: dict, wanted: dict[str, str]) -> list[str]:
    """Packages of which results were measured with other versions than wanted."""
    found = part["versions"]
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def merge(experiment: str, parts: list[dict], command: str) -> dict:
    """Results of several commands as one experiment; every run keeps the command that made it.

    Date, versions and machine are the newest part's. Parts measured with other versions are refused: their runs could
    not be compared.
    """
    if not parts:
        raise ValueError("nothing to merge: no part has finished")
    newest = max(parts, key=lambda part: part["date"])
    for part in parts:
        if differing := other_versions(part, newest["versions"]):
            raise ValueError(
                f"{part['command']} ran with other versions ({', '.join(differing)}) than {newest['command']}; "
                "run it again"
            )
    runs = [{**run, "command": run.get("command", part["command"])} for part in parts for run in part["runs"]]
    return {
        "experiment": experiment,
        "command": command,
        "date": newest["date"],
        "versions": newest["versions"],
        "machine": newest["machine"],
        "runs": runs,
    }


def by_method(results: dict) -> dict[str, list[dict]]:
    """Runs of each method, in the order in which the methods first appear."""
    methods: dict[str, list[dict]] = {}
    for run in results["runs"]:
        methods.setdefault(run["method"], []).append(run)
    return methods
