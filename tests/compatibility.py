"""The compatibility matrix, recorded from the tests: `pytest --compatibility=model_cards/compatibility/results.json`.

A test takes part through a mark that names its table and column, and the parameter whose value is its row:

    @pytest.mark.compatibility("generation", "beam search", row="kind")

Passed is 1, failed 0, skipped (not applicable) null; several tests of one cell must all pass. What a test records with
pytest's `record_property` joins the settings of its row, except `trainable_parameters`, which has a place of its own.
"""

import shlex
from typing import Any

import pytest

from hf_sparsecoding.reports import results


MARKER = (
    "compatibility(table, column, row): the outcome is a cell of the compatibility matrix; see tests/compatibility.py"
)
CELL = "compatibility"


class Recorder:
    """Pytest plugin: collects the outcomes (those of pytest-xdist's workers, too) and writes the file at the end."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.places: dict[tuple[str, ...], int] = {}  # of the tests in the files: workers report in any order

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for place, item in enumerate(items):
            mark = item.get_closest_marker("compatibility")
            if mark is not None:
                table, column = mark.args
                # a property of the report, so that it comes back from a worker with it
                item.user_properties.append((CELL, [place, table, item.callspec.params[mark.kwargs["row"]], column]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if CELL not in properties or (report.when != "call" and report.passed):
            return
        place, table, row, column = properties.pop(CELL)
        for key in ((table, row), (table, row, column)):
            self.places[key] = min(place, self.places.get(key, place))
        run = self.rows.setdefault(
            (table, row),
            {
                "method": row,
                "seed": 0,
                "trainable_parameters": 0,
                "samples": 0,
                "settings": {"table": table},
                "metrics": {},
            },
        )
        run["trainable_parameters"] = properties.pop("trainable_parameters", run["trainable_parameters"])
        run["settings"].update(properties)
        not_applicable = report.skipped and not hasattr(report, "wasxfail")
        outcomes = [run["metrics"].get(column), None if not_applicable else int(report.passed)]
        run["metrics"][column] = min((outcome for outcome in outcomes if outcome is not None), default=None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or not self.rows:
            return
        for (table, row), run in self.rows.items():
            columns = sorted(run["metrics"], key=lambda column: self.places[table, row, column])
            run["metrics"] = {column: run["metrics"][column] for column in columns}
        runs = [self.rows[key] for key in sorted(self.rows, key=self.places.__getitem__)]
        command = shlex.join(["python", "-m", "pytest", *map(str, self.config.invocation_params.args)])
        path = self.config.getoption("--compatibility")
        results.write(path, results.new("compatibility", runs, command))
