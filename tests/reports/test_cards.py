import json
import shutil

import pytest

from hf_sparsecoding.reports.cards import render_all, render_blocks, render_card
from tests.reports.example_results import example_results, example_run


def make_folder(root, template=None, **changes):
    folder = root / "toy"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(example_results(**changes)))
    if template is not None:
        (folder / "card.md").write_text(template)
    return folder


def test_default_card(tmp_path):
    folder = make_folder(tmp_path, runs=[example_run(settings={"note": "50 of 200 steps"})])
    (folder / "lambda_by_layer.png").touch()
    card = render_card(folder)
    for expected in (
        "# toy\n",
        "python scripts/toy.py --all",
        "Run on 2026-01-02 with python 3.11, torch 2.0; 2 cores, CPU.",
        "| few    |     1,234 |",
        "- few: 50 of 200 steps",
        "![lambda by layer](lambda_by_layer.png)",
        "## Limits",
    ):
        assert expected in card
    assert "\n\n\n" not in card


def test_template(tmp_path):
    template = (
        "---\nlicense: x\n---\n# T\n{{value few accuracy_after}}\n{{table accuracy_after vs=control}}\n{{commands}}\n"
    )
    card = render_card(
        make_folder(tmp_path, template, runs=[*example_results()["runs"], example_run("x", command="own")])
    )
    assert card.startswith("---\nlicense: x\n---\n# T\n0.720 ± 0.020\n| method")
    assert "accuracy_after vs control" in card
    assert card.endswith("```bash\nown\n```\n")


def test_names_with_spaces_stand_in_quotes(tmp_path):
    template = '{{value "few, more" accuracy_after}}\n{{table accuracy_after vs="few, more"}}\n'
    card = render_card(make_folder(tmp_path, template, runs=[example_run("few, more"), example_run("x")]))
    assert "accuracy_after vs few, more" in card


def test_rows_and_columns(tmp_path):
    runs = [example_run("sum, p=none, k=1", seed, 0.1 * seed) for seed in (1, 2, 3)]
    runs += [example_run("sum, p=rope, k=2"), example_run("sum, p=rope, k=1", metrics={"other": 1.0})]
    runs += [example_run("other, p=none, k=1"), example_run("sum, none")]
    card = render_card(make_folder(tmp_path, "{{cross sum accuracy_after}}\n", runs=runs))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines()]
    assert cells[0] == ["sum, accuracy_after", "1", "2"]
    assert cells[2:] == [["none", "0.200 ± 0.100", "-"], ["rope", "-", "0.720"]]
    shutil.rmtree(tmp_path / "toy")
    card = render_card(make_folder(tmp_path, '{{cross "" accuracy_after}}\n', runs=runs))
    assert card.splitlines()[0].split() == ["|", "accuracy_after", "|", "none", "|"]  # "sum, none" alone has two parts


def test_a_difference(tmp_path):
    card = render_card(make_folder(tmp_path, "{{difference few control accuracy_after}}"))
    assert card.startswith("+0.310 [+0.2")


def test_accuracies_of_the_tasks(tmp_path):
    settings = {
        "items": {"generation_mean": 8},
        "evaluation": {"protocols": ["generation"], "tasks": ["boolq", "piqa"]},
    }
    metrics = {"boolq": 0.5, "piqa": 0.25, "mean": 0.375, "unanswered_mean": 0.125}
    metrics = {f"generation_{name}": value for name, value in metrics.items()}
    run = example_run("base", settings=settings, metrics=metrics)
    card = render_card(make_folder(tmp_path, "{{accuracies generation}}\n", runs=[run]))
    assert [cell.strip() for cell in card.splitlines()[2].split("|")[1:4]] == ["base", "0.500", "0.250"]
    (tmp_path / "toy" / "card.md").write_text("{{accuracies likelihood}}")
    with pytest.raises(ValueError, match="no protocol 'likelihood' in toy; known: generation"):
        render_card(tmp_path / "toy")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{accuracies}}", "accuracies needs one PROTOCOL"),
        ("{{tabel}}", r"card\.md: unknown directive 'tabel'; known: accuracies"),
        ("{{table score}}", r"card\.md: \{\{table score\}\}: no run of toy has the metric 'score'"),
        ("{{cross few}}", "cross needs PREFIX METRIC, got"),
        ("{{cross few score}}", "no method of toy named \"few, ROW, COLUMN\" has 'score'"),
        ("{{difference few control}}", "difference needs METHOD METHOD METRIC"),
        ("{{difference few other accuracy_after}}", "no metric 'accuracy_after' of method 'other'; methods: few"),
        ("{{value few}}", "value needs METHOD METRIC"),
        ("{{value few score}}", "no metric 'score' of method 'few'; methods: few, control"),
    ],
)
def test_template_errors_name_the_file_and_directive(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        render_card(make_folder(tmp_path, template))


def test_blocks(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "families.md").write_text("| family |\n")
    text = (
        "a\n<!-- generated:part/families -->\n<!-- /generated -->\nb\n"
        "<!-- generated:toy value few accuracy_after -->\nold\nlines\n<!-- /generated -->\n"
    )
    filled = render_blocks(text, tmp_path, "README.md")
    assert "-->\n| family |\n<!-- /generated -->\nb\n" in filled
    assert "accuracy_after -->\n0.720 ± 0.020\n<!-- /generated -->" in filled
    assert render_blocks(filled, tmp_path, "README.md") == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated:none -->\n<!-- /generated -->", r"README\.md: block 'none' needs .*none\.md"),
        ("<!-- generated:none table x -->\n<!-- /generated -->", "no such file"),
        ("<!-- generated:toy -->\ntext", "a generated block is not closed"),
    ],
)
def test_broken_blocks(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        render_blocks(text, tmp_path, "README.md")


def test_render_all_takes_every_folder_with_results(tmp_path):
    folder = make_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    assert list(render_all(tmp_path, tmp_path / "README.md")) == [folder / "README.md"]
