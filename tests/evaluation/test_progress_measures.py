"""Progress measures against loops, accuracies of known models, attention from checkpoints."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_sparsecoding.evaluation import progress_measures as module
from hf_sparsecoding.evaluation.progress_measures import InContextEvaluation, attention_snapshots, progress_measures
from hf_sparsecoding.models import InductionConfig, InductionForSequenceClassification
from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks.in_context_classification import InContextClassification, class_vectors
from hf_sparsecoding.training import TrainingArguments, train


TASK = InContextClassification(classes=12, labels=6, pairs=4, content_size=8, max_pairs=4, burstiness=2)


@pytest.mark.parametrize("rows", [1, 9])
def test_measures_equal_loops(rows):
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(5, 1, 9, 9, generator=generator)
    second = torch.rand(5, 1, rows, 9, generator=generator)
    logits = torch.randn(5, 6, generator=generator)
    context = torch.tensor([[0, 1, 0, 1], [2, 2, 3, 3], [0, 5, 4, 1], [1, 1, 1, 1], [5, 0, 5, 0]])
    labels = torch.tensor([1, 3, 4, 1, 2])  # the last one is not in the context
    expected = {"ila1": 0.0, "tila2": 0.0, "tla2": 0.0, "cla": 0.0}
    for b in range(5):
        for i in range(4):
            item, label = 2 * i, 2 * i + 1
            expected["ila1"] += first[b, 0, label, item].item() / (5 * 4)
            expected["tla2"] += second[b, 0, -1, label].item() / 5
            if context[b, i] == labels[b]:
                expected["tila2"] += second[b, 0, -1, label].item() / 5
        probabilities = logits[b].exp() / logits[b].exp().sum()
        expected["cla"] += sum(probabilities[label].item() for label in set(context[b].tolist())) / 5
    assert progress_measures((first, second), logits, labels, context) == pytest.approx(expected, rel=1e-5)


class Induction(torch.nn.Module):
    """Answers with the label behind the nearest item; attends as an ideal induction head does."""

    device = torch.device("cpu")

    def forward(self, inputs, output_attentions, return_dict):
        batch, count, _ = inputs.shape
        content = inputs[..., TASK.positions :]
        best = torch.cdist(content[:, :-1:2], content[:, -1:])[..., 0].argmin(-1)
        label_vectors = torch.tensor(class_vectors(12, 6, 8, 3)[1])
        vectors = content[torch.arange(batch), 2 * best + 1]
        logits = 100 * (vectors[:, None] == label_vectors).all(-1).float()
        first = torch.eye(count).roll(-1, 1).expand(batch, 1, count, count)
        second = torch.nn.functional.one_hot(2 * best + 1, count).float()[:, None, None]
        return SimpleNamespace(logits=logits, attentions=(first, second))


@pytest.mark.parametrize("batch", [512, 30])
def test_an_ideal_induction_head(monkeypatch, batch):
    """It reads any context, and knows no class by heart: among what it is not shown it is right by chance."""
    monkeypatch.setattr(module, "BATCH", batch)
    metrics = InContextEvaluation(TASK, items=400, seed=3)(Induction())
    assert set(metrics) == {"iw", "iw_unseen", "ic", "ic2", "ila1", "tila2", "tla2", "cla"}
    assert metrics["ic"] > 0.98
    assert metrics["ic2"] > 0.98
    assert metrics["iw"] < 0.6
    shown = TASK.examples(0, 400, "iw", 3)["shown"]
    assert metrics["iw_unseen"] < 0.3
    assert metrics["iw"] == pytest.approx(shown.mean() + (1 - shown.mean()) * metrics["iw_unseen"], abs=0.02)
    assert (metrics["ila1"], metrics["tla2"]) == pytest.approx((1, 1))
    assert metrics["tila2"] == pytest.approx(metrics["ic"], abs=1e-6)
    assert metrics["cla"] == pytest.approx(1, abs=1e-6)


def test_batches_do_not_change_the_metrics(monkeypatch):
    torch.manual_seed(0)
    model = make_model()
    evaluate = InContextEvaluation(TASK, items=100, seed=0)
    whole = evaluate(model)
    monkeypatch.setattr(module, "BATCH", 30)  # the last batch has 10
    assert evaluate(model) == pytest.approx(whole, rel=1e-5)


def make_model():
    return InductionForSequenceClassification(
        InductionConfig(position_size=9, content_size=8, num_pairs=4, head_dim=4, intermediate_size=8, num_outputs=6)
    )


@pytest.fixture
def folder(tmp_path):
    """As the training script leaves it, with checkpoints of steps 2 and 4."""
    torch.manual_seed(0)
    model = make_model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), steps=4, batch_size=8, warmup_steps=0, checkpoint_every=2, progress=False, seed=5
    )

    def batch(start, count):
        examples = TASK.examples(start, count, "train", 5)
        return {name: torch.from_numpy(examples[name]) for name in ("inputs", "labels")}

    train(model, batch, lambda model, batch: model(**batch).loss, arguments)
    model.save_pretrained(tmp_path)
    run = {"method": "m", "seed": 5, "trainable_parameters": 1, "samples": 32, "settings": asdict(TASK), "metrics": {}}
    results.write(tmp_path / results.FILE, results.new("toy", [run]))
    return tmp_path, model


def test_attention_of_checkpoints(folder):
    path, model = folder
    snapshots, texts = attention_snapshots(path, [2, 4], [0, 7])
    assert [snapshot.step for snapshot in snapshots] == [2, 4]
    sequences = TASK.generate(8, "ic", seed=5)
    assert texts == [TASK.text(sequences, 0), TASK.text(sequences, 7)]
    inputs = torch.from_numpy(sequences.inputs[[0, 7]])
    with torch.no_grad():
        first, second = model.eval()(inputs, output_attentions=True).attentions
    np.testing.assert_allclose(snapshots[1].first, first[:, 0], atol=1e-6)
    np.testing.assert_allclose(snapshots[1].second, second[:, 0], atol=1e-6)
    assert not np.allclose(snapshots[0].first, snapshots[1].first, atol=1e-5)


def test_missing_checkpoints_and_foreign_results_are_named(folder):
    path, _ = folder
    with pytest.raises(ValueError, match=r"step-00000003 cannot be used: .*there are: step-00000002, step-00000004"):
        attention_snapshots(path, [3], [0])
    content = results.load(path / results.FILE)
    del content["runs"][0]["settings"]["zipf_exponent"]
    results.write(path / results.FILE, content)
    with pytest.raises(ValueError, match="no run of in-context classification: no 'zipf_exponent'"):
        attention_snapshots(path, [2], [0])
