"""Files: round trips, folders, files as the original data set has them, and damaged ones."""

import numpy as np
import pytest

from hf_sparsecoding.tasks.raven import Raven, folder_dataset, load, model_arrays, read_folder, save, write_folder
from hf_sparsecoding.tasks.raven.files import file_name, split_of


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raven")
    write_folder(folder, ("center", "grid_2x2"), range(12), seed=5, progress=False)
    return folder


def some_images(value: int = 3) -> np.ndarray:
    return np.full((16, 160, 160), value, dtype=np.uint8)


def test_save_and_load(tmp_path):
    raven = Raven("out_in_grid")
    problem = raven.generate(1, "train", seed=0)[0]
    save(tmp_path / "RAVEN_0_train.npz", raven.images(problem), problem.target)
    images, target = load(tmp_path / "RAVEN_0_train.npz")
    assert np.array_equal(images, raven.images(problem))
    assert target == problem.target
    assert [path.name for path in tmp_path.iterdir()] == ["RAVEN_0_train.npz"]  # nothing unfinished


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "RAVEN_0_train.npz", some_images(), 0)
    assert not list(tmp_path.iterdir())


def test_splits_and_names():
    assert [split_of(index) for index in range(8, 18)] == ["test"] * 2 + ["train"] * 6 + ["validation"] * 2
    assert [file_name(index) for index in (10, 7, 9999)] == [
        "RAVEN_10_train.npz",
        "RAVEN_7_val.npz",
        "RAVEN_9999_test.npz",
    ]


def test_a_written_folder(written):
    names = sorted(path.name for path in (written / "center").iterdir())
    assert names == sorted(map(file_name, range(12)))
    raven = Raven("grid_2x2")
    for split, indices in (("train", [0, 1, 2, 3, 4, 5, 10, 11]), ("validation", [6, 7]), ("test", [8, 9])):
        images, targets = read_folder(written / "grid_2x2", split)
        problems = [raven.generate(1, split, seed=5, start=index)[0] for index in indices]
        assert targets.tolist() == [problem.target for problem in problems]
        assert np.array_equal(images, np.stack([raven.images(problem) for problem in problems]))
    part, _ = read_folder(written / "grid_2x2", "train", start=6, count=1)
    assert np.array_equal(part[0], raven.images(raven.generate(1, "train", seed=5, start=10)[0]))


def test_files_that_are_there_are_kept(tmp_path):
    (tmp_path / "center").mkdir()
    save(tmp_path / "center" / "RAVEN_1_train.npz", some_images(), 6)
    write_folder(tmp_path, ("center",), range(2), progress=False)
    images, targets = read_folder(tmp_path / "center", "train")
    assert (images[1] == 3).all()
    assert targets[1] == 6
    assert not (images[0] == 3).all()


def test_arrays_for_models(written):
    arrays = model_arrays(*read_folder(written / "center", "validation"), size=40)
    examples = Raven("center", size=40).examples(6, 2, "validation", seed=5)
    assert np.array_equal(arrays["inputs"], examples["inputs"])
    assert np.array_equal(arrays["labels"], examples["labels"])


def test_dataset_of_a_folder(written):
    dataset = folder_dataset(written / "center", "test", size=80)
    expected = [Raven("center", size=80).dataset(1, "test", seed=5, start=index)[0] for index in (8, 9)]
    for row, same in zip(dataset, expected, strict=True):
        assert row["target"] == same["target"]
        for name in ("panels", "choices"):
            assert all(np.array_equal(*map(np.asarray, pair)) for pair in zip(row[name], same[name], strict=True))


def test_original_files(tmp_path):
    """Other keys, pickled ones too, are left alone, and a name without a split goes by its index."""
    other = np.array([{"pickled": 1}], dtype=object)
    for name, value in (("RAVEN_2_test.npz", 2), ("RAVEN_10.npz", 10), ("RAVEN_8.npz", 8), ("RAVEN_7_val.npz", 7)):
        images = some_images(value)
        np.savez(tmp_path / name, image=images, target=np.uint8(value % 8), meta_matrix=np.eye(8), structure=other)
    (tmp_path / "RAVEN_3_test.xml").write_text("<Data/>")
    found = {split: read_folder(tmp_path, split) for split in ("train", "validation", "test")}
    assert [images[:, 0, 0, 0].tolist() for images, _ in found.values()] == [[10], [7], [2, 8]]
    assert [targets.tolist() for _, targets in found.values()] == [[2], [7], [2, 0]]


def damage(path, how):
    if how == "truncated":
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[200:260] = bytes(60)
        path.write_bytes(content)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not found")
    elif how == "array":
        with open(path, "wb") as file:
            np.save(file, some_images())
    else:
        arrays = {"image": some_images(), "target": np.int64(1), **how}
        np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "delete it and write it again"),
        ("flipped", "delete it and write it again"),
        ("empty", "delete it and write it again"),
        ("text", "delete it and write it again"),
        ("array", "one array instead of an archive"),
        ({"target": None}, "target"),
        ({"image": some_images()[:8]}, r"shape \(16, 160, 160\), got uint8 of shape \(8, 160, 160\)"),
        ({"image": some_images().astype(np.float32)}, "image must be uint8 .* got float32"),
        ({"target": np.int64(8)}, "target must be a whole number from 0 to 7, got 8"),
        ({"target": np.array([1, 2])}, "target must be a whole number"),
        ({"target": np.float64(1.5)}, "target must be a whole number"),
    ],
)
def test_damaged_files(tmp_path, how, message):
    path = tmp_path / "RAVEN_0_train.npz"
    save(path, Raven().images(Raven().generate(1, "train", 0)[0]), 1)
    damage(path, how)
    with pytest.raises(ValueError, match=message) as error:
        read_folder(tmp_path, "train")
    assert str(path) in str(error.value)


def test_bad_values(tmp_path):
    with pytest.raises(ValueError, match="image must be uint8"):
        save(tmp_path / "RAVEN_0_train.npz", some_images()[0], 1)
    with pytest.raises(ValueError, match="target must be a whole number from 0 to 7, got -1"):
        save(tmp_path / "RAVEN_0_train.npz", some_images(), -1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "RAVEN_0_train.npz")
    with pytest.raises(ValueError, match="no RAVEN_.* of split 'test' in .*write_folder"):
        read_folder(tmp_path, "test")
    with pytest.raises(ValueError, match="split must be one of .* got 'val'"):
        folder_dataset(tmp_path, "val")
    with pytest.raises(ValueError, match="start and count must be >= 0, got -1 and None"):
        read_folder(tmp_path, "train", start=-1)
    with pytest.raises(ValueError, match=r"configurations must be out of .* got \['centre'\]"):
        write_folder(tmp_path, ("centre",), range(1))
