"""Extended linear attention and its baselines: the formulas, gradients, saving, errors."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_sparsecoding.models import LinearAttentionConfig, LinearAttentionForRegression, LinearAttentionModel
from hf_sparsecoding.models.linear_attention import ExtendedLinearAttention, ScoreBiasAttention
from hf_sparsecoding.models.linear_attention.attention import ROLES
from hf_sparsecoding.models.linear_attention.configuration_linear_attention import KINDS
from hf_sparsecoding.ops import reference
from hf_sparsecoding.tasks.ridge_regression import RidgeRegression


SIZES = [(1, 1), (1, 7), (7, 1), (5, 5), (65, 3), (3, 65)]  # m tokens, n columns


def prompts(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stacked(module, kind: str) -> torch.Tensor:
    return torch.stack([getattr(module, f"{role}_{kind}") for role in ROLES])


def make(kind=ExtendedLinearAttention, *sizes: int, **options):
    torch.manual_seed(0)
    module = kind(*sizes, **options).double()
    if getattr(module, "score_bias", None) is not None:
        torch.nn.init.normal_(module.score_bias)  # it starts at zero, where tests would not see it
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_extended_attention_equals_the_reference(m, n, heads, bias):
    """Values and gradients, of the prompts and of every parameter."""
    module = make(ExtendedLinearAttention, n, m, num_heads=heads, bias=bias)
    hidden_states = prompts(2, m, n).requires_grad_()
    biases = stacked(module, "bias") if bias else torch.zeros(3, heads, m, n, dtype=torch.float64)
    expected = reference.extended_linear_attention(hidden_states, stacked(module, "weight"), biases)
    actual = module(hidden_states)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    inputs, direction = [hidden_states, *module.parameters()], prompts(2, m, n, seed=2)
    gradients = (torch.autograd.grad(out, inputs, direction) for out in (actual, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "n"), [(5, 3), (3, 5)])
def test_score_bias_attention_by_hand(m, n, bias):
    """Row by row, with the oracle's softmax."""
    module = make(ScoreBiasAttention, n, m, num_heads=2, bias=bias)
    hidden_states = prompts(2, m, n)
    expected = torch.zeros_like(hidden_states)
    for head in range(2):
        query, key, value = (hidden_states @ getattr(module, f"{role}_weight")[head] for role in ROLES)
        scores = torch.einsum("bti,bsi->bts", query, key)
        scores = scores + module.score_bias[head] if bias else scores
        expected += reference.coefficients("softmax", scores) @ value
    torch.testing.assert_close(module(hidden_states), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [ExtendedLinearAttention, ScoreBiasAttention])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_finite_differences(kind, bias):
    module = make(kind, 2, 3, num_heads=2, bias=bias)
    names = [name for name, _ in module.named_parameters()]

    def function(hidden_states, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), hidden_states)

    assert torch.autograd.gradcheck(function, (prompts(2, 3, 2).requires_grad_(), *module.parameters()))


def test_prompts_need_no_batch():
    module = make(ExtendedLinearAttention, 3, 5, num_heads=2)
    batch = prompts(4, 2, 5, 3)
    assert module(batch).shape == (4, 2, 5, 3)
    torch.testing.assert_close(module(batch[1, 0]), module(batch)[1, 0])


def test_without_constants_the_length_is_free():
    for kind in (ExtendedLinearAttention, ScoreBiasAttention):
        module = make(kind, 3, 5, bias=False)
        assert module(prompts(2, 9, 3)).shape == (2, 9, 3)
        with pytest.raises(ValueError, match="must have 3 columns .hidden_size., got 4"):
            module(prompts(2, 5, 4))
        with pytest.raises(ValueError, match="must have 5 tokens .sequence_length., got 9.*append rows of zeros"):
            make(kind, 3, 5)(prompts(2, 9, 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "n", "heads"), [(17, 5, 1), (17, 5, 4), (5, 17, 2), (33, 9, 2)])
def test_fresh_layers_keep_the_size_of_their_inputs(m, n, heads, bias):
    for kind in (ExtendedLinearAttention, ScoreBiasAttention):
        sizes = []
        for seed in range(20):
            torch.manual_seed(seed)
            sizes.append(kind(n, m, heads, bias)(torch.randn(64, m, n)).square().mean())
        assert 0.1 < torch.stack(sizes).median() < 3, kind


def model_of(kind: str = "extended", task: RidgeRegression | None = None, **options) -> LinearAttentionForRegression:
    task = task or RidgeRegression(num_features=2, num_examples=5)
    torch.manual_seed(0)
    sizes = {"hidden_size": task.num_features + 1, "sequence_length": task.num_examples + 1}
    return LinearAttentionForRegression(LinearAttentionConfig(kind, **sizes, **options)).eval()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_stacked(kind, residual):
    model = model_of(kind, num_hidden_layers=2, num_attention_heads=2, residual=residual)
    hidden_states = inputs = torch.randn(4, 6, 3)
    for layer in model.model.layers:
        mixed = layer(hidden_states)
        hidden_states = mixed + hidden_states if residual else mixed
    output = model(inputs, labels=torch.arange(4.0), output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[-1], hidden_states)
    assert torch.equal(output.logits, hidden_states[:, -1:, -1])
    torch.testing.assert_close(output.loss, (hidden_states[:, -1, -1] - torch.arange(4.0)).square().mean())
    assert isinstance(model(inputs, return_dict=False), tuple)


def test_parameters_of_each_kind():
    """Three n x n matrices per head and layer; three m x n for "extended", one m x m for "score_bias"."""
    expected = {"linear": 3 * 9, "softmax": 3 * 9, "extended": 3 * 9 + 3 * 18, "score_bias": 3 * 9 + 36}
    for kind in KINDS:
        assert model_of(kind, num_hidden_layers=3, num_attention_heads=2).num_parameters() == 6 * expected[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_saves_and_loads_through_the_auto_classes(tmp_path, kind):
    model = model_of(kind, num_hidden_layers=2, num_attention_heads=2, residual=True)
    with torch.no_grad():
        for parameter in model.parameters():  # none is as a fresh model has it
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    saved = {**AutoConfig.from_pretrained(tmp_path).to_dict(), "_name_or_path": ""}
    assert saved == model.config.to_dict()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is LinearAttentionForRegression
    inputs = torch.randn(4, 6, 3)
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is LinearAttentionModel
    assert torch.equal(bare(inputs).last_hidden_state, model.model(inputs)[0])


def test_every_parameter_gets_a_gradient():
    for kind in KINDS:
        model = model_of(kind, num_hidden_layers=2, num_attention_heads=2).train()
        model(torch.randn(4, 6, 3), labels=torch.randn(4)).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().sum() > 0, (kind, name)


def test_trains_with_trainer_on_its_data_set(tmp_path):
    task = RidgeRegression(num_features=2, num_examples=5)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none"
    )
    trainer = Trainer(model_of(task=task), arguments, train_dataset=task.dataset(16, "train", seed=0))
    assert not trainer.model_accepts_loss_kwargs
    assert 0 < trainer.train().training_loss < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cubic"}, "kind must be one of extended, linear, score_bias, softmax, got 'cubic'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_attention_heads": -1}, "num_attention_heads must be at least 1, got -1"),
    ],
)
def test_configurations_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionConfig(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_prompts_of_another_type_than_the_model(dtype):
    prompts, labels = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2)
    expected = model_of()(prompts, labels)
    output = model_of().to(dtype)(prompts, labels)
    assert output.logits.dtype == dtype
    torch.testing.assert_close(output.logits.float(), expected.logits, atol=0.05, rtol=0.05)
    torch.testing.assert_close(output.loss.float(), expected.loss, atol=0.05, rtol=0.05)
    output.loss.backward()


def test_inputs_that_do_not_fit():
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"inputs must be prompts \[B, 6, 3\], got \(2, 7, 3\)"):
            model_of(kind)(torch.zeros(2, 7, 3))
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\), got \(2, 1\)"):
        model_of()(torch.zeros(2, 6, 3), labels=torch.zeros(2, 1))
