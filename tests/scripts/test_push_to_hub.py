"""Publishing over HTTP with huggingface_hub's client, against the Hub of tests/hub_stub.py."""

import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard

from tests.hub_client import ClientError, HubClient
from tests.hub_stub import LARGE, TOKEN, HubStub, Repo
from tests.reports.example_adapter import BASE_MODEL, save_adapter, training_results


@pytest.fixture(scope="module")
def hub():
    with HubStub() as hub:
        hub.repos[BASE_MODEL] = Repo()
        yield hub
        assert not hub.unknown


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with HubClient(hub, tmp_path_factory.mktemp("home")) as client:
        client.run("import time; time.sleep = lambda seconds: None")  # huggingface_hub waits between its six attempts
        yield client


@pytest.fixture
def push(hub, client, tmp_path):
    """Publish the folder; what is printed, or ClientError."""

    def push(folder, repo_id, *flags, token=TOKEN):
        arguments = ["--adapter", str(folder), "--repo_id", repo_id, *flags]
        return client.run(f"from scripts.push_to_hub import main; main({arguments})", token)

    yield push
    hub.fail("", "", times=0)


@pytest.fixture
def adapter(tmp_path):
    """A folder as a training leaves it: more than is to be published."""
    folder = save_adapter(tmp_path / "adapter")
    (folder / "results.json").write_text(json.dumps(training_results()))
    (folder / "lambda.png").write_bytes(b"a picture")
    for other in ("README.md", "before.json", "optimizer.pt", "training_args.bin", "checkpoints/1/state.safetensors"):
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text("not for the Hub")
    return folder


def contents(folder) -> dict:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PUBLISHED = {"adapter_config.json", "adapter_model.safetensors", "README.md", "results.json", "lambda.png"}


def test_publish(hub, push, adapter):
    before = contents(adapter)
    printed = push(adapter, "me/first", "--commit_message", "Few numbers")
    assert f"published: {hub.url}/me/first/commit/" in printed
    assert hub.repos["me/first"].messages == ["Few numbers"]
    files = hub.files("me/first")
    assert files.keys() == PUBLISHED
    for name in PUBLISHED - {"README.md", "adapter_config.json"}:
        assert files[name] == before[name]
    assert json.loads(files["adapter_config.json"]) == json.loads(before["adapter_config.json"])
    assert contents(adapter) == before
    large = {name for name, file in hub.repos["me/first"].at("main")[1].items() if file.large}
    assert large == {name for name in PUBLISHED if name.endswith(LARGE)}
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == BASE_MODEL
    assert card.data.eval_results[0].metric_value == 0.72
    push(adapter, "me/first", "--overwrite_card")
    assert len(hub.repos["me/first"].messages) == 1  # nothing has changed


def test_dry_run_uploads_nothing_and_needs_no_token(hub, push, adapter):
    seen = len(hub.requests)
    printed = push(adapter, "me/dry", "--dry_run", token=None)
    assert set(re.findall(r"bytes  (\S+)", printed)) == PUBLISHED
    assert (adapter / "hub_card.md").read_text().startswith(f"---\nbase_model: {BASE_MODEL}\n")
    assert (adapter / "README.md").read_text() == "not for the Hub"
    assert len(hub.requests) == seen
    push(adapter, "me/dry")
    assert hub.files("me/dry").keys() == PUBLISHED
    assert hub.files("me/dry")["README.md"].decode() == (adapter / "hub_card.md").read_text()


def test_without_results(hub, push, adapter):
    (adapter / "results.json").rename(adapter / "elsewhere.json")
    with pytest.raises(ClientError, match=r"no such file: .*results\.json; give --results, or --no_results"):
        push(adapter, "me/plain")
    push(adapter, "me/plain", "--no_results")
    assert hub.files("me/plain").keys() == PUBLISHED - {"results.json"}
    push(adapter, "me/plain", "--results", str(adapter / "elsewhere.json"), "--overwrite_card")
    assert hub.files("me/plain").keys() == PUBLISHED


def test_local_base_model_is_replaced_by_its_id(hub, push, adapter, tmp_path):
    local = tmp_path / "base"
    local.mkdir()
    save_adapter(adapter, base_model_name_or_path=str(local))
    with pytest.raises(ClientError, match="is a folder on this machine, which nobody else has; give --base_model"):
        push(adapter, "me/local")
    push(adapter, "me/local", "--base_model", BASE_MODEL)
    assert json.loads(hub.files("me/local")["adapter_config.json"])["base_model_name_or_path"] == BASE_MODEL
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(local)
    assert str(local) not in hub.files("me/local")["README.md"].decode()


def test_card_on_the_hub_is_kept(hub, push, adapter):
    push(adapter, "me/card")
    repo = hub.repos["me/card"]
    files = repo.at("main")[1]
    files["README.md"] = files["README.md"]._replace(content=b"---\nlicense: mit\n---\nwritten by hand\n")
    (adapter / "lambda.png").write_bytes(b"another picture")
    assert "kept the README.md that is on the Hub; --overwrite_card replaces it" in push(adapter, "me/card")
    assert hub.files("me/card")["lambda.png"] == b"another picture"
    assert b"written by hand" in hub.files("me/card")["README.md"]
    assert "kept" not in push(adapter, "me/card", "--overwrite_card")
    assert b"written by hand" not in hub.files("me/card")["README.md"]


def test_private(hub, push, adapter):
    push(adapter, "me/secret", "--private")
    assert hub.repos["me/secret"].private
    push(adapter, "me/open")
    with pytest.raises(ClientError, match="me/open exists and is public; make it private in its settings"):
        push(adapter, "me/open", "--private")


def test_branch(hub, push, adapter):
    for _ in range(2):
        push(adapter, "me/branches", "--revision", "longer/training")
    assert hub.files("me/branches") == {}
    files = hub.files("me/branches", "longer/training")
    assert files.keys() == PUBLISHED
    assert b'from_pretrained("me/branches", revision="longer/training")' in files["README.md"]


@pytest.mark.parametrize(("method", "part"), [("PUT", "/upload/"), ("POST", "/commit/"), ("POST", "/objects/batch")])
def test_server_that_fails_in_the_middle(hub, push, adapter, method, part):
    repo = f"me/fails-{part.split('/')[1]}"
    (adapter / "lambda.png").write_bytes(repo.encode())  # stored by no other test
    before = contents(adapter)
    hub.fail(method, part)
    with pytest.raises(ClientError, match="500 Internal Server Error") as error:
        push(adapter, repo)
    assert "Nothing is lost and nothing half published" in str(error.value)
    assert hub.files(repo) == {}
    assert contents(adapter) == before
    hub.fail(method, part, times=0)
    seen = len(hub.requests)
    push(adapter, repo)
    assert hub.files(repo).keys() == PUBLISHED
    sent_again = [request for request in hub.requests[seen:] if request.startswith("PUT")]
    assert bool(sent_again) == (part != "/commit/")


def test_client_tries_again_by_itself(hub, push, adapter):
    (adapter / "lambda.png").write_bytes(b"for this test only")
    hub.fail("PUT", "/upload/", times=2)
    seen = len(hub.requests)
    push(adapter, "me/retried")
    assert sum(request.startswith("PUT") for request in hub.requests[seen:]) == 3
    assert hub.files("me/retried").keys() == PUBLISHED


def test_who_may_not(hub, client, push, adapter):
    assert client.run('from huggingface_hub import whoami; print(whoami()["name"])') == "me\n"
    with pytest.raises(ClientError, match=r"(?s)Token is required .*Log in with `hf auth login`, or set HF_TOKEN"):
        push(adapter, "me/nobody", token=None)
    with pytest.raises(ClientError, match=r"(?s)401.*Check --repo_id me/nobody, and that your token may write there"):
        push(adapter, "me/nobody", token="hf_wrong")
    with pytest.raises(ClientError, match=r"(?s)403.*under the namespace you.*Check --repo_id you/name"):
        push(adapter, "you/name")
    with pytest.raises(ClientError, match="base model 'me/gone' is not on the Hub, or .*; give --base_model"):
        push(adapter, "me/nobody", "--base_model", "me/gone")
    assert "me/nobody" not in hub.repos


@pytest.mark.parametrize(
    ("repo_id", "flags", "damage", "message"),
    [
        ("me/x", ["--adapter", "gone"], None, "no adapter in gone: adapter_config.json is missing"),
        ("name", [], None, "--repo_id must be USER/NAME, got 'name'"),
        ("a/b/c", [], None, "'a/b/c'"),
        ("me/x", ["--no_results", "--results", "r.json"], None, "--no_results contradicts --results r.json"),
        ("me/x", ["--base_model", "no id"], None, "'no id' is no id of the Hub .*; give --base_model"),
        ("me/x", ["--method", "many"], None, r"of: few \(seed 0\); choose one with --method"),
        ("me/x", [], {"base_model_name_or_path": None}, "does not name its base model; give --base_model"),
        ("me/x", [], {"num_contexts": 2, "task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ("me/x", [], "truncated", "truncated or corrupt"),
        ("me/x", [], "pickle", "is a pickle"),
    ],
)
def test_what_cannot_be_published(hub, push, adapter, repo_id, flags, damage, message):
    weights = adapter / "adapter_model.safetensors"
    if isinstance(damage, dict):
        save_adapter(adapter, **damage)
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "pickle":
        shutil.move(weights, adapter / "adapter_model.bin")
    seen = len(hub.requests)
    with pytest.raises(ClientError, match=f"SystemExit: error: .*{message}"):
        push(adapter, repo_id, *flags)
    assert len(hub.requests) == seen
