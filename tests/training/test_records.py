import pytest

from hf_sparsecoding.training.records import hold_out, read


GOOD = '{"prompt": "a", "completion": "b"}'


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_both_formats(tmp_path):
    expected = [{"prompt": "a", "completion": "b"}, {"prompt": "ä\n", "completion": " c", "rule": "r"}]
    second = '{"prompt": "ä\\n", "completion": " c", "rule": "r"}'
    assert read(write(tmp_path / "d.jsonl", f"{GOOD}\n\n{second}\n")) == expected
    assert read(write(tmp_path / "d.json", f"[{GOOD},\n{second}]")) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.jsonl", f'{GOOD}\n{{"prompt": "a"}}\n', r"d\.jsonl:2: the record lacks completion; it has prompt"),
        ("d.jsonl", f"{GOOD}\n\n{{}}\n", r"d\.jsonl:3: the record lacks prompt and completion; it has nothing"),
        ("d.jsonl", f"{GOOD}\n{{oops\n", r"d\.jsonl:2: not JSON"),
        ("d.jsonl", f"{GOOD}\n[1]\n", r"d\.jsonl:2: a record must be an object"),
        (
            "d.jsonl",
            '{"prompt": "a", "completion": 3}',
            r"d\.jsonl:1: completion must be text that is not empty, got 3",
        ),
        ("d.json", f'[{GOOD},\n\n  {{"completion": "b"}}]', r"d\.json:3: the record lacks prompt; it has completion"),
        ("d.json", f"[{GOOD},\n{GOOD}", r"d\.json:2: not JSON"),
        ("d.json", f"[{GOOD}]\n[{GOOD}]", r"d\.json:2: text after the end of the list"),
        ("d.json", f"[{GOOD}\n{GOOD}]", r"d\.json:2: not JSON \(a comma or the end of the list"),
        ("d.json", f"[{GOOD},]", r"d\.json:1: not JSON \(Expecting value"),
        ("d.json", GOOD, r"d\.json:1: a \.json file must hold a list"),
        ("d.jsonl", "\n", "holds no records"),
        ("d.csv", "a,b", "must end in"),
    ],
)
def test_errors_point_at_the_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / name, text))


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "d.jsonl")


def test_hold_out_is_a_seeded_partition():
    records = [{"prompt": str(i), "completion": "x"} for i in range(20)]
    training, held_out = hold_out(records, 0.25, seed=0)
    assert len(held_out) == 5
    assert sorted(training + held_out, key=records.index) == records
    assert (training, held_out) == hold_out(records, 0.25, seed=0)
    assert held_out != hold_out(records, 0.25, seed=1)[1]
    assert len(hold_out(records, 0.001, seed=0)[1]) == 1
    with pytest.raises(ValueError, match=r"held_out_share must be between 0 and 1, both excluded, got 1\.5"):
        hold_out(records, 1.5, seed=0)
    with pytest.raises(ValueError, match="give more records or eval_data"):
        hold_out(records[:1], 0.5, seed=0)
