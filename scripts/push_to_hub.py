"""Publish a saved adapter on the Hub, with a card rendered from its results.

    python scripts/push_to_hub.py --adapter outputs/mine --repo_id USER/NAME --dry_run    # look at it first
    python scripts/push_to_hub.py --adapter outputs/mine --repo_id USER/NAME --private

Uploaded are adapter_config.json, adapter_model.safetensors, the card, results.json and the folder's pictures, in one
commit; no checkpoints. An adapter of a base model in a local folder needs --base_model, the same model's id on the
Hub, which is then written into the uploaded adapter_config.json. --dry_run needs no token and no network: it writes
the card to hub_card.md in the adapter's folder and lists the files. The license is Apache-2.0 unless --license names
another. A card that is on the Hub already is kept unless --overwrite_card is given.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_sparsecoding.adapter.config import check_weights
from hf_sparsecoding.reports import results as results_io
from hf_sparsecoding.reports.adapter_card import CONFIG, WEIGHTS, AdapterCard, choose_run, read_config
from hf_sparsecoding.training.command_line import parse


CARD, PREVIEW = "README.md", "hub_card.md"


class PushError(RuntimeError):
    """Nothing was published; the message says why and what to do."""


@dataclass(frozen=True)
class PushArguments:
    """What is published, where, and what its card says."""

    adapter: str = field(metadata={"help": "folder of the saved adapter"})
    repo_id: str = field(metadata={"help": "USER/NAME or ORGANISATION/NAME on the Hub; made if it does not exist"})
    private: bool = field(default=False, metadata={"help": "make the repository private"})
    revision: str = field(default="", metadata={"help": "branch, made if it does not exist; default: main"})
    base_model: str = field(default="", metadata={"help": "base model's id on the Hub; default: the adapter's"})
    results: str = field(default="", metadata={"help": "results file; default: results.json of the adapter's folder"})
    no_results: bool = field(default=False, metadata={"help": "publish without results"})
    method: str = field(default="", metadata={"help": "the adapter's method in the results, where there are several"})
    seed: int | None = field(default=None, metadata={"help": "the adapter's seed in the results"})
    license: str = field(default="apache-2.0", metadata={"help": "license of the adapter, as the Hub names it"})
    datasets: list[str] = field(default_factory=list, metadata={"help": "ids of the data on the Hub, for the card"})
    overwrite_card: bool = field(default=False, metadata={"help": "replace a card that is on the Hub already"})
    commit_message: str = field(default="Upload adapter", metadata={"help": "message of the commit"})
    dry_run: bool = field(default=False, metadata={"help": "write the card and list the files; upload nothing"})

    def __post_init__(self):
        validate_repo_id(self.repo_id)
        if "/" not in self.repo_id:
            raise ValueError(f"--repo_id must be USER/NAME, got {self.repo_id!r}")
        if self.results and self.no_results:
            raise ValueError(f"--no_results contradicts --results {self.results}; drop one of them")


def base_model_id(arguments: PushArguments, config: dict) -> str:
    """The base model as others find it."""
    name = arguments.base_model or config.get("base_model_name_or_path") or ""
    cure = "give --base_model, the base model's id on the Hub (USER/NAME)"
    if not name:
        raise ValueError(f"{arguments.adapter} does not name its base model; {cure}")
    if Path(name).exists():
        raise ValueError(f"the base model {name!r} is a folder on this machine, which nobody else has; {cure}")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"the base model {name!r} is no id of the Hub ({error}); {cure}") from error
    return name


def make_files(arguments: PushArguments) -> dict[str, bytes]:
    """What is uploaded, by its name on the Hub."""
    folder = Path(arguments.adapter)
    check_weights(str(folder))
    config = read_config(folder)
    base_model = base_model_id(arguments, config)
    path = Path(arguments.results or folder / results_io.FILE)
    results = run = None
    if not arguments.no_results:
        if not path.is_file():
            raise ValueError(f"no such file: {path}; give --results, or --no_results to publish without")
        results = results_io.load(path)
        run = choose_run(results, config, arguments.method, arguments.seed)
    card = AdapterCard(
        folder=folder,
        repo_id=arguments.repo_id,
        base_model=base_model,
        results=results,
        run=run,
        license=arguments.license,
        datasets=arguments.datasets,
        revision=arguments.revision,
    )
    published = json.dumps({**config, "base_model_name_or_path": base_model}, indent=2, sort_keys=True)
    files = {
        CONFIG: published.encode(),
        WEIGHTS: (folder / WEIGHTS).read_bytes(),
        CARD: card.render().encode(),
    }
    if results is not None:
        files[results_io.FILE] = path.read_bytes()
    return files | {picture.name: picture.read_bytes() for picture in sorted(folder.glob("*.png"))}


def push(arguments: PushArguments, files: dict[str, bytes]) -> str:
    """Upload the files; the commit's address."""
    api = HfApi(token=True)
    target, revision = arguments.repo_id, arguments.revision or None
    base_model = json.loads(files[CONFIG])["base_model_name_or_path"]
    try:
        if not api.repo_exists(base_model):
            raise PushError(
                f"the base model {base_model!r} is not on the Hub, or your token may not read it; "
                "give --base_model, its id there"
            )
        api.create_repo(target, private=arguments.private or None, exist_ok=True)
        if arguments.private and not api.model_info(target).private:
            raise PushError(f"{target} exists and is public; make it private in its settings, or drop --private")
        if revision:
            api.create_branch(target, branch=revision, exist_ok=True)
        if not arguments.overwrite_card and api.file_exists(target, CARD, revision=revision):
            print(f"kept the {CARD} that is on the Hub; --overwrite_card replaces it")
            files = {name: content for name, content in files.items() if name != CARD}
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        return api.create_commit(
            target, operations, commit_message=arguments.commit_message, revision=revision
        ).commit_url
    except (PushError, ValueError):  # the latter: the Hub does not accept the card
        raise
    except Exception as error:  # of HTTP, the connection, or the client's threads: what to do depends on the status
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        reasons = "\n".join(str(reason) for reason in (error, cause) if reason is not None)
        raise PushError(f"{reasons}\n{what_to_do(cause or error, target)}") from error


def what_to_do(error: BaseException, repo_id: str) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "Log in with `hf auth login`, or set HF_TOKEN to a token that may write; --dry_run needs none."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return f"Check --repo_id {repo_id}, and that your token may write there (`hf auth whoami` names its owner)."
    return (
        "Nothing is lost and nothing half published: the adapter's folder is as it was, and the Hub shows an upload "
        "only when all of it is there. Start the same command again; large files that have arrived are not sent twice."
    )


def main(argv: list[str] | None = None) -> int:
    try:
        (arguments,) = parse([PushArguments], sys.argv[1:] if argv is None else argv, __doc__)
        files = make_files(arguments)
        for name, content in files.items():
            print(f"{len(content):>12,} bytes  {name}")
        if arguments.dry_run:
            preview = Path(arguments.adapter) / PREVIEW
            results_io.write_text(preview, files[CARD].decode())
            print(f"nothing uploaded; the card is in {preview}")
        else:
            print(f"published: {push(arguments, files)}")
    except (ValueError, PushError) as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
