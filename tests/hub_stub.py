"""A Hub on 127.0.0.1, as far as huggingface_hub needs one.

    with HubStub() as hub, HubClient(hub, tmp_path) as client:
        client.run('from huggingface_hub import create_repo; create_repo("me/model")')
        hub.fail("PUT", "/upload/", times=2)

The stub knows one user and one token. As on the Hub, nothing of an upload shows before its commit; .safetensors and
.png go to the large-file storage (basic transfer), which is another host, gets no token, and is reached by redirects.
Requests that it cannot answer are in `hub.unknown`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import yaml


USER, TOKEN = "me", "hf_token_of_the_tests"
LARGE = (".safetensors", ".png")
REPO = r"(?P<repo>[^/]+/[^/]+)"
Headers = dict[str, str]


class HubFailure(Exception):
    """An answer that is an error; `code` is what huggingface_hub tells the kinds apart by."""

    def __init__(self, status: int, message: str, code: str = "", **body):
        self.status, self.headers = status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.body = {"error": message, **body}


class File(NamedTuple):
    content: bytes
    large: bool

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> tuple[str, dict[str, File]]:
        """(commit, its files) of a branch or commit."""
        commit = self.branches.get(revision, revision)
        if commit not in self.commits:
            raise HubFailure(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, self.commits[commit]


@dataclass
class Failure:
    method: str
    part: str
    status: int
    times: float


class HubStub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.storage: dict[str, bytes] = {}  # large files by their sha256
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.failures: list[Failure] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def storage_url(self) -> str:
        return f"http://localhost:{self.server_port}"  # another host to a client, which keeps its token back

    def fail(self, method: str, part: str, status: int = 500, times: float = float("inf")) -> None:
        """Answer the next `times` requests whose path holds `part` with an error; times=0 ends that."""
        self.failures = [Failure(method, part, status, times)] if times else []

    def add(self, repo: str, folder: Path, private: bool = False) -> None:
        """Put a repository there without any request."""
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        files = {name: File(path.read_bytes(), name.endswith(LARGE)) for name, path in found.items()}
        self.storage |= {file.sha256: file.content for file in files.values() if file.large}
        self.repos[repo] = Repo(private, {"1" * 40: files}, {"main": "1" * 40})

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.repos[repo].at(revision)[1].items()}

    def __enter__(self) -> HubStub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def handle_request(self) -> None:
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        try:
            self.answer(*self.route(path))
        except HubFailure as failure:
            self.answer(failure.body, failure.headers, failure.status)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def route(self, path: str) -> tuple:
        self.server.requests.append(f"{self.command} {path}")
        for failure in self.server.failures:
            if failure.method == self.command and failure.part in path and failure.times > 0:
                failure.times -= 1
                raise HubFailure(failure.status, "the stub was told to fail")
        method = "GET" if self.command == "HEAD" else self.command
        for known, pattern, call in ROUTES:
            if known == method and (match := re.fullmatch(pattern, path)):
                return call(self, **{name: unquote(value) for name, value in match.groupdict(default="").items()})
        self.server.unknown.append(f"{self.command} {path}")
        raise HubFailure(404, f"unknown: {self.command} {path}")

    def answer(self, body: object, headers: Headers | None = None, status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def authorized(self) -> bool:
        sent = self.headers.get("Authorization")
        if sent not in (None, f"Bearer {TOKEN}"):
            raise HubFailure(401, "Invalid credentials in Authorization header")
        return sent is not None

    def readable(self, repo: str) -> Repo:
        found = self.server.repos.get(repo)
        if found is None or (found.private and not self.authorized()):
            raise HubFailure(404 if self.authorized() else 401, "Repository not found", "RepoNotFound")
        return found

    def writable(self, repo: str) -> Repo:
        found = self.readable(repo)
        if not self.authorized():
            raise HubFailure(401, "Invalid username or password.")
        if repo.split("/")[0] != USER:
            raise HubFailure(403, f"You don't have the rights to write to {repo}")
        return found


# What can be asked for: each function returns (body, headers, status), the last two only where they matter


def whoami(request: Handler):
    if not request.authorized():
        raise HubFailure(401, "Invalid username or password.")
    return ({"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}},)


def create_repo(request: Handler):
    wanted = json.loads(request.content)
    repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
    if not request.authorized():
        raise HubFailure(401, "Invalid username or password.")
    if not repo.startswith(f"{USER}/"):
        raise HubFailure(403, f"You don't have the rights to create a model under the namespace {repo.split('/')[0]}")
    if repo in request.server.repos:
        raise HubFailure(409, "You already created this model repo", url=f"{request.server.url}/{repo}")
    request.server.repos[repo] = Repo(private=wanted.get("visibility") == "private")
    return ({"url": f"{request.server.url}/{repo}", "name": repo, "id": repo},)


def validate_yaml(request: Handler):
    """The Hub reads a card's metadata before it takes a commit; here: YAML, base model and model-index."""
    content = json.loads(request.content)["content"]
    metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
    errors = []
    for model in [metadata["base_model"]] if metadata.get("base_model") else []:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
            errors.append({"message": f'"base_model" with value "{model}" is not valid. Use a model id.'})
    for result in (result for model in metadata.get("model-index", []) for result in model["results"]):
        if not (result["task"]["type"] and result["dataset"]["type"] and result["metrics"]):
            errors.append({"message": f'"model-index" has an incomplete result: {result}'})
    return {"errors": errors, "warnings": []}, {}, 400 if errors else 200


def preupload(request: Handler, repo: str, revision: str):
    _, files = request.writable(repo).at(revision)
    answers = []
    for file in json.loads(request.content)["files"]:
        path, known = file["path"], files.get(file["path"])
        mode = "lfs" if path.endswith(LARGE) else "regular"
        oid = known and (known.sha256 if known.large else known.blob_id)
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return ({"files": answers},)


def batch(request: Handler, repo: str):
    request.writable(repo)
    objects = []
    for wanted in json.loads(request.content)["objects"]:
        answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
        if wanted["oid"] not in request.server.storage:
            verify = f"{request.server.url}/api/verify/{wanted['oid']}"
            upload = f"{request.server.storage_url}/upload/{wanted['oid']}"
            answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        objects.append(answer)
    return ({"transfer": "basic", "objects": objects},)


def upload(request: Handler, oid: str):
    no_token(request)
    if hashlib.sha256(request.content).hexdigest() != oid:
        raise HubFailure(400, f"the content is not {oid}")
    request.server.storage[oid] = request.content
    return ({},)


def verify(request: Handler, oid: str):
    sent = json.loads(request.content)
    if sent["oid"] != oid or sent["size"] != len(request.server.storage.get(oid, b"")):
        raise HubFailure(404, f"{oid} was not uploaded")
    return ({},)


def commit(request: Handler, repo: str, revision: str):
    found = request.writable(repo)
    if revision not in found.branches:
        raise HubFailure(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    files, summary = dict(found.at(revision)[1]), ""
    for line in request.content.splitlines():
        entry = json.loads(line)
        key, value = entry["key"], entry["value"]
        if key == "header":
            summary = value["summary"]
        elif key == "file":
            files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile":
            files[value["path"]] = File(request.server.storage[value["oid"]], large=True)
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            raise HubFailure(400, f"unknown operation {key}")
    oid = hashlib.sha1(f"{repo} {len(found.commits)}".encode()).hexdigest()
    found.commits[oid] = files
    found.branches[revision] = oid
    found.messages.append(summary)
    return ({"success": True, "commitOid": oid, "commitUrl": f"{request.server.url}/{repo}/commit/{oid}"},)


def create_branch(request: Handler, repo: str, branch: str):
    found = request.writable(repo)
    if branch in found.branches:
        raise HubFailure(409, f"Reference already exists: {branch}")
    found.branches[branch] = found.at(json.loads(request.content).get("startingPoint", "main"))[0]
    return ({},)


def info(request: Handler, repo: str, revision: str = ""):
    found = request.readable(repo)
    oid, files = found.at(revision or "main")
    siblings = [{"rfilename": path} for path in files]
    return ({"id": repo, "sha": oid, "private": found.private, "tags": [], "siblings": siblings},)


def tree(request: Handler, repo: str, revision: str, folder: str = ""):
    _, files = request.readable(repo).at(revision)
    entries = []
    for path, file in files.items():
        entry = {"type": "file", "path": path, "oid": file.blob_id, "size": len(file.content)}
        if file.large:
            entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}
        entries += [entry] if path.startswith(f"{folder}/" if folder else "") else []
    if folder and not entries:
        raise HubFailure(404, f"{folder} does not exist", "EntryNotFound")
    return (entries,)


def resolve(request: Handler, repo: str, revision: str, path: str):
    oid, files = request.readable(repo).at(revision)
    headers = {"X-Repo-Commit": oid}
    if path not in files:
        raise HubFailure(404, "Entry not found", "EntryNotFound")
    file = files[path]
    if not file.large:
        return file.content, {**headers, "ETag": f'"{file.blob_id}"'}
    headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
    return b"", {**headers, "Location": f"{request.server.storage_url}/storage/{file.sha256}"}, 302


def storage(request: Handler, oid: str):
    no_token(request)
    return request.server.storage[oid], {"ETag": f'"{oid}"'}


def no_token(request: Handler) -> None:
    if "Authorization" in request.headers:
        raise HubFailure(400, "a token was sent to the storage")


ROUTES: list[tuple[str, str, Callable]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", batch),
    ("PUT", "/upload/(?P<oid>[0-9a-f]{64})", upload),
    ("POST", "/api/verify/(?P<oid>[0-9a-f]{64})", verify),
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)", commit),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>[^/]+)", create_branch),
    ("GET", f"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", info),
    ("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", tree),
    ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    ("GET", "/storage/(?P<oid>[0-9a-f]{64})", storage),
]
