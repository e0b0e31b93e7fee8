"""A process that talks to the Hub of tests/hub_stub.py with the real clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hub_stub import TOKEN, HubStub


# huggingface_hub reads its settings when it is imported, and takes seconds to import with torch: one process for many
# requests. A request is code, which runs in one namespace with those before.
CLIENT = """
import contextlib, io, json, os, sys, traceback
answers, namespace = sys.stdout, {"__name__": "client"}
for line in sys.stdin:
    request = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if request["token"]:
        os.environ["HF_TOKEN"] = request["token"]
    output, error = io.StringIO(), ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(request["code"], namespace)
        except BaseException as raised:
            error = "".join(traceback.format_exception_only(raised))
            traceback.print_exc(file=sys.__stderr__)
    print(json.dumps([output.getvalue(), error]), file=answers, flush=True)
os._exit(0)  # torch takes seconds to leave
"""


class ClientError(Exception):
    """What the code printed, and its exception; the traceback goes to stderr."""


class HubClient:
    """A Python process whose Hub is the stub."""

    def __init__(self, hub: HubStub, home: Path):
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "no_proxy": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env={**own, **settings},  # nothing of the user's tokens and caches
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, token: str | None = TOKEN) -> str:
        """What the code prints.

        Raises:
            ClientError: if the code raises.
        """
        print(json.dumps({"code": code, "token": token}), file=self.process.stdin, flush=True)
        output, error = json.loads(self.process.stdout.readline())
        if error:
            raise ClientError(output + error)
        return output

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *error) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=300)
