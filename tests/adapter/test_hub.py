"""Publishing and loading over HTTP with the real clients, against the Hub of tests/hub_stub.py."""

import re
from pathlib import Path

import pytest
import torch

from hf_sparsecoding.reports.adapter_card import AdapterCard
from tests.hub_client import ClientError, HubClient
from tests.hub_stub import LARGE, HubStub
from tests.tiny_models import adapted, tiny_model, tokens
from tests.training.character_model import save_character_model


IMPORT_FIRST = """
from peft import PeftConfig
try:
    PeftConfig.from_pretrained("me/pasted")
except KeyError as error:
    print("KeyError", *error.args)
"""
PRELUDE = """
import time; time.sleep = lambda seconds: None  # huggingface_hub waits between its six attempts
import torch
from huggingface_hub import snapshot_download
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
import hf_sparsecoding
from hf_sparsecoding import SparseTransformerConfig, SparseTransformerForTokenClassification
from tests.tiny_models import adapted, tokens

ids = tokens(2, 11)

def base_model():
    return AutoModelForCausalLM.from_pretrained("me/base")

def adapter(seed=1, **config):
    return adapted(base_model(), seed, **{"task_type": "CAUSAL_LM", "lags": [1, 4], **config})

def logits(model):
    return model.eval()(ids).logits
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with a base model, and an adapter with its card."""
    folder = tmp_path_factory.mktemp("models")
    save_character_model(folder / "base")
    model = adapted(tiny_model(), task_type="CAUSAL_LM", lags=[1, 4])
    model.peft_config["default"].base_model_name_or_path = "me/base"
    model.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").write_text(AdapterCard(folder / "adapter", "me/pasted", "me/base").render())
    torch.save(model(tokens(2, 11)).logits, folder / "expected.pt")
    with HubStub() as hub:
        hub.expected = str(folder / "expected.pt")
        hub.add("me/base", folder / "base")
        hub.add("me/pasted", folder / "adapter")
        yield hub
        assert not hub.unknown


@pytest.fixture(scope="module")
def pasted(hub, tmp_path_factory):
    """(a process, what it printed first): the card's snippet, without and with its first line."""
    (snippet,) = re.findall("```python\n(.*?)```", hub.files("me/pasted")["README.md"].decode(), re.S)
    with HubClient(hub, tmp_path_factory.mktemp("home")) as client:
        printed = client.run(IMPORT_FIRST), client.run(snippet)
        client.run(PRELUDE)
        yield client, printed


@pytest.fixture
def client(hub, pasted):
    yield pasted[0]
    hub.fail("", "", times=0)


def test_snippet_of_the_card_works_when_pasted(pasted):
    without, generated = pasted[1]
    assert without == "KeyError SPARSECODING\n"
    assert generated.splitlines()[-1].startswith("1 2 3")


def test_logits_are_those_of_the_process_that_saved(hub, client):
    client.run(f"assert torch.equal(logits(model), torch.load({hub.expected!r}))")  # the snippet's model


def test_push_and_load_by_every_road(hub, client):
    client.run("""
model = adapter(seed=2, target_coefficient=True)
model.push_to_hub("me/adapter")
injected = base_model()
injected.load_adapter("me/adapter")
models = {
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained("me/adapter"),
    "PeftModel": PeftModel.from_pretrained(base_model(), "me/adapter"),
    "load_adapter": injected,
    "AutoModel": AutoModelForCausalLM.from_pretrained("me/adapter"),
}
for name, loaded in models.items():
    assert torch.equal(logits(loaded), logits(model)), name
""")
    files = hub.repos["me/adapter"].at("main")[1]
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {name for name, file in files.items() if file.large} == {"adapter_model.safetensors"}


def test_files_arrive_as_they_were(hub, client):
    folder = client.run('print(snapshot_download("me/base"), end="")').splitlines()[-1]
    files = hub.files("me/base")
    assert {name.endswith(LARGE) for name in files} == {True, False}
    for name, content in files.items():
        assert Path(folder, name).read_bytes() == content


def test_card_on_the_hub_is_kept(hub, client):
    client.run('adapter().push_to_hub("me/card")')
    files = hub.repos["me/card"].at("main")[1]
    before = files["adapter_model.safetensors"]
    files["README.md"] = files["README.md"]._replace(content=b"---\nlicense: mit\n---\nwritten by hand\n")
    client.run('adapter(seed=3).push_to_hub("me/card")')
    assert b"written by hand" in hub.files("me/card")["README.md"]
    assert hub.files("me/card")["adapter_model.safetensors"] != before.content


def test_branch(hub, client):
    client.run("""
model = adapter(seed=4)
model.push_to_hub("me/branches", revision="longer")
loaded = AutoPeftModelForCausalLM.from_pretrained("me/branches", revision="longer")
assert torch.equal(logits(loaded), logits(model))
""")
    assert hub.files("me/branches") == {}
    with pytest.raises(ClientError, match=r"Can't find 'adapter_config\.json' at 'me/branches'"):
        client.run('AutoPeftModelForCausalLM.from_pretrained("me/branches")')


def test_private(hub, client):
    client.run('model = adapter(seed=5); model.push_to_hub("me/private", private=True)')
    load = 'loaded = AutoPeftModelForCausalLM.from_pretrained("me/private")'
    with pytest.raises(ClientError, match=r"Can't find 'adapter_config\.json' at 'me/private'"):
        client.run(load, token=None)
    reason = f"try:\n    {load}\nexcept ValueError as error:\n    print(error.__cause__)"
    assert "make sure you are authenticated" in client.run(reason, token=None)
    client.run(f"{load}\nassert torch.equal(logits(loaded), logits(model))")


@pytest.mark.parametrize(("method", "part"), [("PUT", "/upload/"), ("POST", "/commit/")])
def test_server_that_fails_in_the_middle(hub, client, method, part):
    repo = f"me/fails-{part.split('/')[1]}"
    hub.fail(method, part)
    client.run(f"model = adapter(seed={len(part)}); expected = logits(model)")
    with pytest.raises(ClientError, match="500 Internal Server Error|while uploading 'adapter_model.safetensors'"):
        client.run(f"model.push_to_hub({repo!r})")
    assert hub.files(repo) == {}
    hub.fail(method, part, times=2 if method == "PUT" else 0)  # twice: the client goes on by itself
    client.run(f"""
assert torch.equal(logits(model), expected)
model.push_to_hub({repo!r})
assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained({repo!r})), expected)
""")


def test_pickle_on_the_hub_is_refused(hub, client, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(hub.files("me/pasted")["adapter_config.json"])
    (tmp_path / "adapter_model.bin").write_bytes(b"anything")
    hub.add("me/pickle", tmp_path)
    with pytest.raises(ClientError, match=r"me/pickle/adapter_model\.bin is a pickle"):
        client.run('AutoPeftModelForCausalLM.from_pretrained("me/pickle")')
    assert not any(request.startswith("GET") and request.endswith(".bin") for request in hub.requests)


def test_small_model(hub, client):
    client.run("""
config = SparseTransformerConfig(hidden_size=16, num_hidden_layers=1, mixer="sparse_coding", transfer="aligned")
small = SparseTransformerForTokenClassification(config).eval()
small.push_to_hub("me/small")
loaded = AutoModelForTokenClassification.from_pretrained("me/small").eval()
assert type(loaded) is SparseTransformerForTokenClassification
cells = torch.randint(0, config.num_values, (2, config.sequence_length))
assert torch.equal(loaded(cells).logits, small(cells).logits)
""")
    assert hub.files("me/small").keys() == {"README.md", "config.json", "model.safetensors"}
