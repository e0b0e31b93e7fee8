"""Set-up of all tests: one thread, no downloads, and `--compatibility`, which records what works with what."""

import os

import pytest
import torch


os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():  # before anything imports triton, whose kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compatibility",
        metavar="FILE",
        help="write the outcomes of the tests marked `compatibility` to this results.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    from tests.compatibility import MARKER, Recorder

    config.addinivalue_line("markers", MARKER)
    if config.getoption("--compatibility"):
        config.pluginmanager.register(Recorder(config), "compatibility")
    torch.set_num_threads(1)  # tiny models: threads cost more than they bring


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps the precision of the first Accelerator of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
