"""Run a script for every method and seed of a YAML file, several at once, and gather one results.json.

    python scripts/sweep.py scripts/configs/smollm2_s_raven_text.yaml --jobs 2
    python scripts/sweep.py scripts/configs/smollm2_s_raven_text.yaml --set model=my/folder --output_dir outputs/mine

The file names the `command` (a script that takes --method, --seed and --output_dir and writes results.json there), the
`common` arguments, the `methods` with the arguments of each, the `seeds`, an `experiment` and an `output_dir`. Started
again after an interruption, finished runs are skipped and the others go on from their own checkpoints (--gather_only
starts none, and writes the results.json of those that are finished). A run that fails stops no other; the exit status
is then 1.

A `grid` of arguments with lists of values makes a method of every combination, for each of `methods` or without them.
Instead of a list, a mapping gives each value further arguments of its own, {softmax: {}, top_k: {kept_keys: 8}}, which
count more than those of `methods`, as these do more than `common` and --set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path

import yaml
from transformers.hf_argparser import string_to_bool

from hf_sparsecoding.reports import results, tables
from hf_sparsecoding.training.arguments import ASSUMED
from hf_sparsecoding.training.command_line import Loader, near_match, read_mapping, to_flags


TAIL_LINES = 15
CONFIG_RECORD = "config_file.json"  # in a run's folder: what the --config file said when it was started
GRACE_SECONDS = 10  # between asking the children to stop and killing them


@dataclass(frozen=True)
class Sweep:
    """Contents of the YAML file."""

    experiment: str
    command: str
    seeds: list[int]
    output_dir: str
    methods: dict[str, dict] = field(default_factory=dict)
    common: dict = field(default_factory=dict)
    grid: dict[str, list | dict] = field(default_factory=dict)

    def __post_init__(self):
        for name, kind in (("methods", dict), ("seeds", list), ("common", dict), ("grid", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        if self.grid:
            object.__setattr__(self, "methods", expand(self.methods or {"": {}}, self.grid))
        if not self.methods or not self.seeds:
            raise ValueError(f"need at least one method and one seed, got {list(self.methods)} and {self.seeds}")
        for method, own in self.methods.items():
            if not isinstance(method, str) or not isinstance(own, dict | None):
                raise ValueError(f"methods must map names to mappings of arguments, got {method!r}: {own!r}")
        if not all(type(seed) is int for seed in self.seeds) or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be whole numbers, each once, got {self.seeds}")
        if not Path(self.command).is_file():
            raise ValueError(f"command {self.command!r} is no file; give a script, relative to the current folder")


@dataclass
class Job:
    """One method with one seed, in a folder of its own."""

    method: str
    seed: int
    folder: Path
    command: list[str]
    process: subprocess.Popen | None = None
    began: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    def finished(self) -> bool:
        """Whether results are there. Results of other arguments than today's are refused, not overwritten."""
        if not (self.folder / results.FILE).is_file():
            return False
        record = self.folder / "command.json"
        recorded = json.loads(record.read_text()) if record.is_file() else None
        if recorded != self.command:
            raise ValueError(
                f"{self.folder} holds results of another command ({shlex.join(recorded or ['unknown'])}); delete the "
                "folder or choose another output_dir"
            )
        run = results.load(self.folder / results.FILE)["runs"][0]
        if changed := self.changed_since(run) + self.left_out_since():
            raise ValueError(
                f"{self.folder} holds results from before {', '.join(changed)} changed in the --config file; delete "
                "the folder or choose another output_dir"
            )
        return True

    @property
    def flags(self) -> set[str]:
        return {word.partition("=")[0] for word in self.command}  # a negative value is part of its flag's word

    def config_file(self) -> dict:
        """What the command's --config file says today."""
        return read_mapping(self.command[self.command.index("--config") + 1]) if "--config" in self.command else {}

    def left_out_since(self) -> list[str]:
        """Names that the --config file had when the run was started, and has no more: a default applies today."""
        record = self.folder / CONFIG_RECORD
        recorded = json.loads(record.read_text()) if record.is_file() else {}
        values = self.config_file()
        return [name for name in recorded if name not in values and f"--{name}" not in self.flags]

    def changed_since(self, run: dict) -> list[str]:
        """Settings of an earlier run of this command that its --config file gives other values today."""
        values = self.config_file()
        settings = {**ASSUMED, **run["settings"]}
        used = [name for name in values if name in settings and f"--{name}" not in self.flags]
        return [name for name in used if not same(values[name], settings[name])]

    def start(self, threads: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        results.write_text(self.folder / "command.json", json.dumps(self.command))
        results.write_text(self.folder / CONFIG_RECORD, json.dumps(self.config_file(), default=str))
        with self.log.open("a") as log:
            # a session of its own: Ctrl-C reaches only the sweep, which then ends the whole family of each child
            self.process = subprocess.Popen(
                [sys.executable, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )
        self.began = time.monotonic()

    def tail(self) -> str:
        # a progress bar rewrites its line after a carriage return: keep what it last showed
        lines = [line.split("\r")[-1] for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def same(value: object, setting: object) -> bool:
    """Whether a value of a YAML file, where 1e-3 is text, is a setting, where mappings are JSON text. None is the
    argument's default, which settings do not name."""
    if isinstance(value, dict | list) and isinstance(setting, str):
        return value == json.loads(setting)
    if isinstance(value, str) and isinstance(setting, int | float):
        read = string_to_bool if isinstance(setting, bool) else float
        try:
            return read(value) == setting
        except (ValueError, argparse.ArgumentTypeError):
            return False
    return value is None or value == setting


def read_sweep(path: str, overrides: list[str], output_dir: str | None) -> Sweep:
    values = read_mapping(path)
    known = [entry.name for entry in fields(Sweep)]
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: unknown key {name!r}{near_match(str(name), known)}")
    optional = ("common", "grid", "methods") if "grid" in values else ("common", "grid")
    missing = [name for name in known if name not in optional and name not in values]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    common = dict(values.get("common") or {})
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, got {override!r}")
        common[name] = yaml.load(value, Loader)
    return Sweep(**{**values, "common": common, "output_dir": output_dir or values["output_dir"]})


def expand(methods: dict[str, dict], grid: dict[str, list | dict]) -> dict[str, dict]:
    """A method for every method and cell of the grid, named by both: "softmax, width=64, depth=2"."""
    for argument, values in grid.items():
        if not isinstance(values, (list, dict)) or not values:
            raise ValueError(f"grid must give a list or mapping of values for {argument}, got {values!r}")
        if len({str(value) for value in values}) < len(values):
            raise ValueError(f"grid gives a value of {argument} twice: {values!r}")
        for value, needed in values.items() if isinstance(values, dict) else ():
            if not isinstance(needed, dict | None):
                raise ValueError(
                    f"grid must give the further arguments of {argument}={value} as a mapping, got {needed!r}"
                )
            if taken := [name for name in needed or () if name in grid]:
                raise ValueError(f"{argument}={value} of the grid sets {taken[0]}, which the grid varies itself")
    expanded = {}
    for method, own in methods.items():
        for values in product(*grid.values()):
            cell = dict(zip(grid, values, strict=True))
            names = [f"{argument}={value}" for argument, value in cell.items()]
            arguments = {**(own or {}), **cell}
            for argument, value in cell.items():
                arguments |= (grid[argument][value] or {}) if isinstance(grid[argument], dict) else {}
            expanded[", ".join([method, *names] if method else names)] = arguments
    return expanded


def make_jobs(sweep: Sweep) -> list[Job]:
    jobs = []
    for seed in sweep.seeds:  # seed by seed, so that an early end leaves all methods comparable
        for method, own in sweep.methods.items():
            folder = Path(sweep.output_dir) / re.sub(r"[^\w.-]", "_", method) / f"seed-{seed}"
            where = {"method": method, "seed": seed, "output_dir": str(folder)}
            command = [sweep.command, *to_flags({**sweep.common, **(own or {}), **where})]
            if twin := next((job for job in jobs if job.folder == folder), None):
                raise ValueError(f"{twin.method!r} and {method!r} would share the folder {folder}; rename one of them")
            jobs.append(Job(method, seed, folder, command))
    return jobs


def run_jobs(waiting: list[Job], at_once: int, threads: int, total: int) -> list[Job]:
    """Run all jobs, at most `at_once` at a time; the failed ones. However it ends, no child is left running."""
    waiting, running, failed = list(waiting), [], []
    done = total - len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                job.start(threads)
                running.append(job)
                print(f"started {job.name}, log in {job.log}", flush=True)
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                done += 1
                good = job.process.returncode == 0 and (job.folder / results.FILE).is_file()
                if not good:
                    failed.append(job)
                state = "finished" if good else f"FAILED (exit status {job.process.returncode})"
                print(f"[{done}/{total}] {job.name}: {state} in {time.monotonic() - job.began:.0f} s", flush=True)
    finally:
        stop(running)
    return failed


def stop(jobs: list[Job]) -> None:
    """End the processes of all jobs, and what those started."""
    for sign, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        alive = [job for job in jobs if job.process.poll() is None]
        for job in alive:
            os.killpg(job.process.pid, sign)
        deadline = time.monotonic() + (patience or 0)
        while patience and time.monotonic() < deadline and any(job.process.poll() is None for job in alive):
            time.sleep(0.05)
    for job in jobs:
        job.process.wait()


def gathered_before(path: Path, jobs: list[Job]) -> dict[str, dict]:
    """Results by job name of the runs in an earlier gathered file that today's commands and --config files made."""
    if not path.is_file():
        return {}
    saved = results.load(path)
    runs = {run.get("command"): run for run in saved["runs"]}
    commands = {job.name: shlex.join(["python", *job.command]) for job in jobs}
    known = [(job, runs[commands[job.name]]) for job in jobs if commands[job.name] in runs]
    return {job.name: {**saved, "runs": [run]} for job, run in known if not job.changed_since(run)}


def check_versions(finished: list[Job], path: Path, earlier: dict[str, dict]) -> None:
    """Before more runs are started: `results.merge` does not put runs of other versions beside them."""
    today = results.versions()
    parts = {job.folder: results.load(job.folder / results.FILE) for job in finished}
    for place, part in [*parts.items(), *((path, part) for part in earlier.values())]:
        if other := results.other_versions(part, today):
            raise ValueError(
                f"{place} was measured with other versions of {', '.join(other)} than are installed, so new runs "
                "could not be compared with it: install those, delete it, or choose another place with --output_dir "
                "and --results"
            )


def gather(sweep: Sweep, jobs: list[Job], path: Path, earlier: dict[str, dict]) -> dict | None:
    """One results.json of all finished runs; None if there are none. Methods that lack seeds say so in a note."""
    parts = [
        results.load(job.folder / results.FILE) if (job.folder / results.FILE).is_file() else earlier.get(job.name)
        for job in jobs
    ]
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    order = list(sweep.methods)
    for part in parts:
        if unknown := [run["method"] for run in part["runs"] if run["method"] not in order]:
            raise ValueError(
                f"{sweep.command} wrote results of the method {unknown[0]!r}, which --method did not ask for; "
                f"asked for were {', '.join(order)}"
            )
    merged = results.merge(sweep.experiment, parts, results.command_line().replace(" --gather_only", ""))
    merged["runs"].sort(key=lambda run: (order.index(run["method"]), run["seed"]))
    for runs in results.by_method(merged).values():
        for run in runs:
            run["settings"].pop("note", None)
            if len(runs) < len(sweep.seeds):
                run["settings"]["note"] = f"{len(runs)} of the {len(sweep.seeds)} seeds so far"
    results.write(path, merged)
    return merged


def end_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of the sweep")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each run")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="override common arguments"
    )
    parser.add_argument("--output_dir", help="override the file's output_dir")
    parser.add_argument("--results", help="where the gathered results.json goes; default: in output_dir")
    parser.add_argument("--gather_only", action="store_true", help="start nothing, gather the runs that are finished")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1 or arguments.threads < 1:
        parser.error(f"--jobs and --threads must be at least 1, got {arguments.jobs} and {arguments.threads}")
    sweep = read_sweep(arguments.config, arguments.set, arguments.output_dir)
    jobs = make_jobs(sweep)
    path = Path(arguments.results or Path(sweep.output_dir) / results.FILE)
    earlier = gathered_before(path, jobs)
    finished = {job.name for job in jobs if job.finished()}
    waiting = [job for job in jobs if job.name not in finished | set(earlier)]
    if waiting and not arguments.gather_only:
        check_versions([job for job in jobs if job.name in finished], path, earlier)
    print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them finished before")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_on_signal)
    failed = [] if arguments.gather_only else run_jobs(waiting, arguments.jobs, arguments.threads, len(jobs))
    merged = gather(sweep, jobs, path, earlier)
    if merged is None:
        print(f"no run is finished, {path} is not written")
    else:
        names = list(merged["runs"][0]["metrics"])
        shown = [name for name in names if all(name in run["metrics"] for run in merged["runs"])]
        print(tables.method_table(merged, [name for name in shown if not is_detail(name, shown)]))
        print(f"wrote {path}")
    for job in failed:
        print(f"\n{job.name} failed; the end of {job.log}:\n{job.tail()}")
    return int(bool(failed))


def is_detail(name: str, names: list[str]) -> bool:
    """Whether a metric splits up another one, as accuracy_after_addition does accuracy_after; one per feature does
    not."""
    return any(name.startswith(f"{other}_") and name != f"{other}_per_feature" for other in names)


if __name__ == "__main__":
    sys.exit(main())
