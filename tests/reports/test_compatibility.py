"""The compatibility matrix: recorded from test reports, rendered as tables."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_sparsecoding.reports import results
from hf_sparsecoding.reports.compatibility import matrix, refusals
from tests.compatibility import Recorder


def report(place, table, row, column, outcome, when="call", **properties):
    return SimpleNamespace(
        user_properties=[("compatibility", [place, table, row, column]), *properties.items()],
        when=when,
        passed=outcome == "passed",
        skipped=outcome == "skipped",
    )


@pytest.fixture
def recorded(tmp_path) -> dict:
    file = tmp_path / "results.json"
    config = SimpleNamespace(
        getoption=lambda name: file, invocation_params=SimpleNamespace(args=["tests", "--compatibility=x.json"])
    )
    recorder = Recorder(config)
    for item in (
        # in the order of two workers
        report(4, "families", "gemma", "beams", "skipped"),
        report(0, "families", "llama", "cache", "passed", when="setup"),
        report(0, "families", "llama", "cache", "passed", trainable_parameters=9, model="Llama"),
        report(0, "families", "llama", "cache", "passed", when="teardown"),
        report(5, "refused", "t5", "refused", "passed", reason="an encoder-decoder"),
        report(2, "families", "llama", "beams", "passed"),
        report(3, "families", "llama", "beams", "failed"),
        report(1, "families", "gemma", "cache", "failed", when="setup"),
        SimpleNamespace(user_properties=[], when="call", passed=True, skipped=False),
    ):
        recorder.pytest_runtest_logreport(item)
    recorder.pytest_sessionfinish(session=None)
    return results.load(file)


def test_what_is_recorded(recorded):
    assert recorded["experiment"] == "compatibility"
    assert recorded["command"] == "python -m pytest tests --compatibility=x.json"
    llama, gemma, _ = recorded["runs"]
    assert list(llama["metrics"].items()) == [("cache", 1), ("beams", 0)]
    assert llama["trainable_parameters"] == 9
    assert llama["settings"] == {"table": "families", "model": "Llama"}
    assert gemma["metrics"] == {"cache": 0, "beams": None}


def test_tables(recorded):
    assert matrix(Path(), recorded, ["families"]) == (
        "|       | cache | beams |\n| ----- | ----: | ----: |\n| llama |     ✓ |     ✗ |\n| gemma |     ✗ |     – |"
    )
    assert refusals(Path(), recorded, []) == "- `t5`: an encoder-decoder"


def test_tables_that_would_mislead_are_refused(recorded):
    with pytest.raises(ValueError, match="no table 'modes' in compatibility; known: families, refused"):
        matrix(Path(), recorded, ["modes"])
    with pytest.raises(ValueError, match="needs the name of one table"):
        matrix(Path(), recorded, [])
    del recorded["runs"][0]["metrics"]["beams"]
    with pytest.raises(ValueError, match="llama was not tested for beams; run the whole command: python -m pytest"):
        matrix(Path(), recorded, ["families"])
    recorded["runs"][2]["metrics"]["refused"] = 0
    with pytest.raises(ValueError, match="not refused as they should be: t5"):
        refusals(Path(), recorded, [])
