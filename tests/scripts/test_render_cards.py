import json

import pytest

from scripts.render_cards import main


RESULTS = {
    "experiment": "toy",
    "command": "python scripts/toy.py",
    "date": "2026-01-01",
    "versions": {"torch": "1.0"},
    "machine": "2 cores, CPU",
    "runs": [
        {"method": "a", "seed": 0, "trainable_parameters": 3, "samples": 5, "settings": {}, "metrics": {"score": 0.5}}
    ],
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards" / "toy").mkdir(parents=True)
    (tmp_path / "model_cards" / "toy" / "results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "README.md").write_text("# P\n<!-- generated:toy table score -->\nold\n<!-- /generated -->\nend\n")
    return tmp_path


def test_render_then_check(project, capsys):
    assert main(["--check"]) == 1
    assert "stale: README.md" in capsys.readouterr().out
    assert not (project / "model_cards" / "toy" / "README.md").exists()
    assert main([]) == 0
    assert "| a      |         3 |     1 | 0.500 |" in (project / "README.md").read_text()
    assert "python scripts/toy.py" in (project / "model_cards" / "toy" / "README.md").read_text()
    assert main(["--check"]) == 0
    assert main([]) == 0
    assert "0 changed" in capsys.readouterr().out


def test_missing_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([])
    assert "no such folder: model_cards" in capsys.readouterr().err
