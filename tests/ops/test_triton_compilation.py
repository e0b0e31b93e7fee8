"""The kernels compile for GPUs that are not here, within their limits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


def compile_kernels(folder, *options):
    """In a process of its own: where Triton interprets it does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), "--output_dir", str(folder), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def check(folder, *options):
    done = compile_kernels(folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())["runs"]


@pytest.mark.parametrize("arch", ["80", "90"])
def test_soft_thresholding_compiles(tmp_path, arch):
    options = ["--arch", arch, "--first", "--dtype", "bf16", "--head_size", "64", "--kind", "soft_threshold"]
    runs = check(tmp_path, *options)
    kernels = {run["method"].split(",")[0] for run in runs}
    attention = {"forward", "backward_queries", "backward_keys"}
    assert kernels == attention | {"list_tiles", "transfer_forward", "transfer_backward"}
    for run in runs:
        assert 0 < run["metrics"]["registers"] <= 255
        assert run["metrics"]["spill_bytes"] == 0
        if run["method"].split(",")[0] in attention:
            assert run["metrics"]["shared_bytes"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", ["80", "90"])
def test_all_that_may_be_tuned_compiles(tmp_path, dtype, arch):
    sizes = ["64", "128", "256"] if dtype != "fp32" else ["64", "128"]
    check(tmp_path, "--arch", arch, "--dtype", dtype, "--head_size", *sizes)


def test_limits(tmp_path):
    """With a limit that nothing keeps the exit status is 1 and names the kernel."""
    done = compile_kernels(tmp_path, "--kernel", "list_tiles", "--arch", "90", "--max_registers", "1")
    assert done.returncode == 1
    assert "above the limit: list_tiles, lists" in done.stderr
    assert (tmp_path / "results.json").exists()


def test_the_interpreter_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output_dir", str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "TRITON_INTERPRET is set" in done.stderr
