"""The two-layer network, the minimal induction head and nested logits: formulas, initialisation, saving, errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_sparsecoding.models import (
    InductionConfig,
    InductionForSequenceClassification,
    MinimalInductionConfig,
    MinimalInductionForSequenceClassification,
)
from hf_sparsecoding.models.induction.nested_logits import descend, nested_logits, steps_to


SIZES = {
    "position_size": 9,
    "content_size": 6,
    "num_pairs": 3,
    "head_dim": 4,
    "intermediate_size": 5,
    "num_outputs": 7,
}
OPTIONS = [
    {},
    {"score_norm": "keys", "output_norm": "length"},
    {"transfer": "paper"},
    {"transfer": "aligned"},
    {"mixer": "sparse_coding"},
    {"mixer": "sparse_coding", "score_norm": "keys", "output_norm": "length", "threshold": 0.6},
    {"mixer": "sparse_coding", "score_norm": "keys", "transfer": "paper"},
    {"mixer": "sparse_coding", "score_norm": "keys", "output_norm": "length", "transfer": "aligned"},
]


def network(**options) -> InductionForSequenceClassification:
    torch.manual_seed(0)
    model = InductionForSequenceClassification(InductionConfig(**{**SIZES, **options})).eval().double()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "transfer_weight")):  # these start at zero, where tests would not see them
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def minimal(**options) -> MinimalInductionForSequenceClassification:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("content_size", "intermediate_size", "num_outputs")}
    model = MinimalInductionForSequenceClassification(MinimalInductionConfig(**{**sizes, **options})).eval().double()
    for name, value in {"beta1": 1.5, "alpha": -0.8, "beta2": 0.6}.items():
        if hasattr(model, name):
            torch.nn.init.constant_(getattr(model, name), value)
    return model


def tokens(batch: int = 3, pairs: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 2 * pairs + 1, 15, dtype=torch.float64, generator=generator)


def attention_by_hand(config, layer, u: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One layer for one sequence, token by token: (what each token receives, coefficients [T, T])."""
    count = len(u)
    alpha = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        query = layer.query_proj.weight @ u[i]
        scores = torch.stack([(layer.key_proj.weight @ u[j]) @ query for j in range(i + 1)])
        if config.score_norm == "keys":
            scores = scores / (scores.square().mean() + 1e-6).sqrt()
        if config.mixer == "softmax":
            alpha[i, : i + 1] = scores.exp() / scores.exp().sum()
        else:
            alpha[i, : i + 1] = scores.sign() * (scores.abs() - config.threshold).clamp(min=0)
    lifted = alpha.clone()
    if config.transfer != "none":
        for pair in range(config.num_pairs):
            item, distance = 2 * pair, count - 1 - 2 * pair
            for j in range(item + 1):
                place = j + distance if config.transfer == "aligned" else j
                lifted[-1, place] += layer.transfer_weight[0, pair] * alpha[item, j]
    received = []
    for i in range(count):
        total = sum(lifted[i, j] * (layer.value_proj.weight @ u[j]) for j in range(count))
        received.append(total / (i + 1) ** 0.5 if config.output_norm == "length" else total)
    return received, lifted


def classify_by_hand(classifier, features: torch.Tensor) -> torch.Tensor:
    hidden = (classifier[0].weight @ features + classifier[0].bias).clamp(min=0)
    hidden = (classifier[2].weight @ hidden + classifier[2].bias).clamp(min=0)
    return classifier[4].weight @ hidden + classifier[4].bias


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_network_equals_its_formula(options):
    model, inputs = network(**options), tokens()
    output = model(inputs, output_attentions=True)
    for number, sequence in enumerate(inputs):
        u = list(sequence)
        received, first = attention_by_hand(model.config, model.layers[0], u)
        v = [one + other for one, other in zip(u, received, strict=True)]
        received, second = attention_by_hand(model.config, model.layers[1], v)
        expected = classify_by_hand(model.classifier, v[-1] + received[-1])
        torch.testing.assert_close(output.logits[number], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(output.attentions[0][number, 0], first, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(output.attentions[1][number, 0], second[-1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label_bias", [False, True])
def test_the_minimal_model_equals_its_formula(label_bias):
    model, inputs = minimal(label_bias=label_bias), tokens()
    output = model(inputs, output_attentions=True)
    beta1, alpha, beta2 = 1.5, -0.8, 0.6 if label_bias else 0.0
    for number, sequence in enumerate(inputs):
        x = list(sequence[:, -6:])
        q1 = torch.zeros(7, 7, dtype=torch.float64)
        for i in range(7):
            weights = [math.exp(beta1 * (j == i - 1)) for j in range(i + 1)]
            q1[i, : i + 1] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        y = [sum(q1[i, j] * x[j] for j in range(7)) for i in range(7)]
        weights = torch.stack([(alpha * (y[j] @ x[-1]) + beta2 * (j % 2)).exp() for j in range(7)])
        q2 = weights / weights.sum()
        w = sum(q2[j] * x[j] for j in range(7))
        expected = classify_by_hand(model.classifier, torch.cat([w, x[-1]]))
        torch.testing.assert_close(output.logits[number], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(output.attentions[0][number, 0], q1, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(output.attentions[1][number, 0, 0], q2, rtol=1e-9, atol=1e-9)


def test_the_minimal_model_has_two_or_three_numbers_and_sees_no_position():
    assert {"beta1", "alpha"} == {name for name, p in minimal().named_parameters() if p.ndim == 0}
    model, inputs = minimal(label_bias=True), tokens()
    assert {"beta1", "alpha", "beta2"} == {name for name, p in model.named_parameters() if p.ndim == 0}
    moved = inputs.clone()
    moved[..., :9] += 1
    torch.testing.assert_close(model(moved).logits, model(inputs).logits, rtol=0, atol=0)
    torch.testing.assert_close(model(inputs[..., 9:]).logits, model(inputs).logits, rtol=0, atol=0)
    fresh = MinimalInductionForSequenceClassification(MinimalInductionConfig(label_bias=True))
    assert [fresh.beta1.item(), fresh.alpha.item(), fresh.beta2.item()] == [0, 0, 0]


@pytest.mark.parametrize("make", [lambda: network(transfer="aligned"), lambda: minimal(label_bias=True)])
def test_loss_and_gradients(make):
    model, labels = make().train(), torch.tensor([0, 3, 6])
    output = model(tokens(), labels=labels)
    expected = -output.logits.log_softmax(-1)[torch.arange(3), labels].mean()
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-6, atol=0)
    assert output.attentions is None
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_initial_weights_have_the_published_size():
    torch.manual_seed(0)
    model = InductionForSequenceClassification(InductionConfig(transfer="paper", transfer_init=0.25))
    for layer in model.layers:
        for matrix in (layer.query_proj, layer.key_proj, layer.value_proj):
            assert matrix.bias is None
            assert matrix.weight.shape == (128, 128)
            assert matrix.weight.std().item() == pytest.approx(63**-0.5, rel=0.03)
        assert (layer.transfer_weight == 0.25).all()
    assert model.classifier[0].weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert model.classifier[4].weight.shape == (32, 128)
    # two layers of three matrices; three layers with biases; one lambda per pair and layer
    assert model.num_parameters() == 6 * 128**2 + 2 * (128**2 + 128) + 128 * 32 + 32 + 2 * 8


def test_transfer_of_zero_is_no_transfer():
    plain = network()
    for transfer in ("paper", "aligned"):
        lifted = network(transfer=transfer)
        lifted.load_state_dict(plain.state_dict(), strict=False)
        for layer in lifted.layers:
            torch.nn.init.zeros_(layer.transfer_weight)
        torch.testing.assert_close(lifted(tokens()).logits, plain(tokens()).logits, rtol=1e-12, atol=1e-12)


def test_sparse_coefficients_are_exactly_zero():
    model = network(mixer="sparse_coding", score_norm="keys", threshold=1.0)
    first, _ = model(tokens(), output_attentions=True).attentions
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    assert 0.3 < (first[:, 0][:, seen] == 0).double().mean() < 0.9


@pytest.mark.parametrize("labels", [2, 7, 32])
@pytest.mark.parametrize("make", [network, minimal])
def test_saved_models_come_back(tmp_path, make, labels):
    model = make(num_outputs=labels).float()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.config.num_labels == labels
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    inputs = tokens().float()
    torch.testing.assert_close(again(inputs).logits, model(inputs).logits, rtol=0, atol=0)
    logits, *attentions = again(inputs, output_attentions=True, return_dict=False)
    assert logits.shape == (3, labels)
    assert [alpha.shape for alpha in attentions[0]] == [(3, 1, 7, 7), (3, 1, 1, 7)]


def test_any_number_of_pairs_without_transfer():
    model = network()
    assert model(tokens(pairs=1)).logits.shape == (3, 7)
    assert model(tokens(pairs=5)).logits.shape == (3, 7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: InductionConfig(mixer="hyla"), "mixer must be one of softmax, sparse_coding, got 'hyla'"),
        (lambda: InductionConfig(transfer="both"), "transfer must be one of none, paper, aligned, got 'both'"),
        (lambda: InductionConfig(threshold=float("nan")), "threshold must be >= 0 and finite, got nan"),
        (lambda: InductionConfig(threshold=float("inf")), "threshold must be >= 0 and finite, got inf"),
        (lambda: network(num_outputs=7, num_labels=4), "num_outputs=7 and num_labels=4 are the same number"),
        (lambda: InductionConfig(head_dim=0), "head_dim must be at least 1, got 0"),
        (lambda: MinimalInductionConfig(content_size=0), "content_size must be at least 1, got 0"),
        (lambda: network()(tokens()[:, :6]), r"tokens, 15 numbers\], got \(3, 6, 15\)"),
        (lambda: network()(tokens()[..., :14]), r"tokens, 15 numbers\], got \(3, 7, 14\)"),
        (lambda: minimal()(tokens()[..., :5]), r"at least 6 numbers\], got \(3, 7, 5\)"),
        (lambda: network(transfer="paper")(tokens(pairs=2)), "transfer is between 3 pairs, got 2"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


PAIRS, LABELS = [4, 8, 8, 8], [16, 32, 9, 8]


def test_steps_of_gradient_descent_on_nested_logits():
    descent = descend(PAIRS, LABELS, steps=6900)
    assert steps_to(descent, PAIRS) == [314, 670, 1627, 6853]
    # xi comes first, a and b1 later; with L = N it takes twenty times as long as with L = 32
    xi, b1, a = descent.parameters[200, :, 0]
    assert xi > 3 * a > 3 * b1 > 0


def test_what_is_never_reached_has_no_steps():
    descent = descend(PAIRS, LABELS, steps=400)
    assert steps_to(descent, PAIRS) == [314, None, None, None]


def test_the_slope_of_nested_logits_at_the_origin():
    pairs, labels = np.array(PAIRS), np.array(LABELS)
    loss, gradient = nested_logits(np.zeros((3, 4)), pairs, labels)
    np.testing.assert_allclose(loss, np.log(labels))
    np.testing.assert_allclose(gradient[0], -(1 / pairs - 1 / labels), atol=1e-15)
    np.testing.assert_array_equal(gradient[1:], 0)
    assert gradient[0, 3] == 0


def test_nested_logits_equal_their_formula():
    """The loss written out, and its gradient by differences, at random points."""
    rng, step = np.random.default_rng(0), 1e-6
    for n, labels in itertools.product((2, 4, 8), (8, 11)):
        point = rng.normal(size=3)

        def loss(xi, b1, a, n=n, labels=labels):
            q1 = math.exp(b1) / (math.exp(b1) + 2 * n - 1)
            q2 = math.exp(a * q1) / (math.exp(a * q1) + n - 1)
            others = (n - 1) * math.exp(xi * (1 - q2) / (n - 1)) + labels - n
            return -math.log(math.exp(xi * q2) / (math.exp(xi * q2) + others))

        value, gradient = nested_logits(point, np.array(n), np.array(labels))
        assert value == pytest.approx(loss(*point), rel=1e-12)
        for place, slope in enumerate(gradient):
            up, down = point.copy(), point.copy()
            up[place] += step
            down[place] -= step
            assert slope == pytest.approx((loss(*up) - loss(*down)) / (2 * step), abs=1e-8)


@pytest.mark.parametrize(("pairs", "labels"), [([4], [3]), ([1], [4]), ([4, 8], [16])])
def test_nested_logits_refuse(pairs, labels):
    with pytest.raises(ValueError, match="need settings of pairs >= 2 and labels >= pairs"):
        descend(pairs, labels, steps=1)
