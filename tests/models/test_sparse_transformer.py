"""The Sparse Coding Transformer: the formulas, the reference's size, transfer, saving, errors."""

import itertools

import jaxtyping
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageToImage,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from hf_sparsecoding.models import (
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)
from hf_sparsecoding.models.sparse_transformer.configuration_sparse_transformer import CHOICES, MIXERS
from hf_sparsecoding.models.sparse_transformer.modeling_sparse_transformer import from_patches, to_patches
from hf_sparsecoding.ops import reference
from hf_sparsecoding.tasks.s_raven import SRaven


SMALL = {
    "num_values": 5,
    "sequence_length": 12,
    "context_length": 4,
    "target_length": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 4,
}
IMAGES = {**SMALL, "input_type": "patches", "image_size": 8, "patch_size": 4, "target_length": 4}


def small(seed: int = 0, kind=SparseTransformerForTokenClassification, **options):
    torch.manual_seed(seed)
    model = kind(SparseTransformerConfig(**{**SMALL, **options})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "transfer_weight")):  # these start at zero, where tests would not see them
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def some_inputs(batch: int = 3) -> torch.Tensor:
    inputs = torch.randint(0, 5, (batch, 12), generator=torch.Generator().manual_seed(1))
    inputs[:, -2:] = -1
    return inputs


@pytest.mark.parametrize("mixer", MIXERS)
def test_parameters_of_the_reference(mixer):
    """402,824 at four layers: the public reference's count; transfer adds 2 numbers per layer."""
    for transfer, added in (("none", 0), ("paper", 8), ("aligned", 8)):
        model = SparseTransformerForTokenClassification(SparseTransformerConfig(mixer=mixer, transfer=transfer))
        assert sum(parameter.numel() for parameter in model.parameters()) == 402_824 + added


def attention_by_hand(model, hidden_states: torch.Tensor) -> torch.Tensor:
    """The first layer's attention from explicit coefficients, one head at a time, with the oracle's functions."""
    config, attention = model.config, model.model.layers[0].attention
    batch, tokens, _ = hidden_states.shape
    projected = attention.qkv_proj(hidden_states).view(batch, tokens, 3, config.num_attention_heads, config.head_dim)
    query, key, value = (projected[:, :, i].transpose(1, 2) for i in range(3))
    key = key.relu() if config.phi == "relu" else key
    value = value.relu() if config.psi == "relu" else value
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / config.head_dim**0.5
    for t, s in itertools.product(range(tokens), range(tokens)):
        if config.position_bias == "past":
            scores[:, :, t, s] += attention.position_bias[:, max(t - s, 0)]
        elif config.position_bias == "both":
            scores[:, :, t, s] += attention.position_bias[:, t - s + tokens - 1]
    norms = {"heads": 1, "keys": -1}
    if config.score_norm != "none":
        scores = reference.rms_normalised(scores, norms[config.score_norm], 1e-6)
    lift = config.transfer != "none"
    if lift and config.transfer_stage == "scores":
        scores = reference.context_transfer(
            scores, attention.transfer_weight, config.context_length, config.transfer == "aligned"
        )
    sigma = {"softmax": "softmax", "sparse_coding": "soft_threshold"}.get(config.mixer, "linear")
    alpha = reference.coefficients(sigma, scores, threshold=config.threshold)
    if lift and config.transfer_stage == "coefficients":
        alpha = reference.context_transfer(
            alpha, attention.transfer_weight, config.context_length, config.transfer == "aligned"
        )
    out = reference.hyla(alpha, value) if config.mixer == "hyla" else alpha @ value
    out = reference.rms_normalised(out, -1, 1e-6) if config.output_norm == "head" else out
    out = out / tokens**0.5 if config.output_norm == "length" else out
    return attention.o_proj(out.transpose(1, 2).flatten(2)), alpha


@pytest.mark.parametrize(
    "options",
    [
        *({"mixer": m, "transfer": t} for m, t in itertools.product(MIXERS, CHOICES["transfer"])),
        *({"mixer": m, "transfer": "aligned", "transfer_stage": "scores"} for m in MIXERS),
        {"mixer": "sparse_coding", "score_norm": "heads", "psi": "relu", "transfer": "aligned"},
        {"mixer": "sparse_coding", "score_norm": "keys", "phi": "relu", "output_norm": "head", "transfer": "paper"},
        {"mixer": "sparse_coding", "score_norm": "keys", "output_norm": "length", "transfer": "aligned"},
        {"mixer": "softmax", "transfer": "aligned", "transfer_per_head": True, "position_bias": "both"},
        {"mixer": "linear", "transfer": "paper", "transfer_per_head": True, "position_bias": "none"},
    ],
)
def test_attention_equals_the_formula(options):
    model = small(**options).double()
    attention = model.model.layers[0].attention
    hidden_states = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected, expected_alpha = attention_by_hand(model, hidden_states)
    actual, alpha = attention(hidden_states, output=True)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(alpha, expected_alpha, rtol=1e-9, atol=1e-9)
    without, nothing = attention(hidden_states)
    assert nothing is None
    torch.testing.assert_close(without, expected, rtol=1e-9, atol=1e-9)
    last, _ = attention(hidden_states, last=2)
    torch.testing.assert_close(last, expected[:, -2:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_gets_a_gradient(mixer):
    learned = {"threshold_type": "head"} if mixer == "sparse_coding" else {}
    model = small(mixer=mixer, transfer="aligned", **learned).train()
    model(some_inputs(), labels=torch.zeros(3, 2, dtype=torch.long)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("transfer", ["paper", "aligned"])
def test_an_unobserved_target_has_coefficients_only_by_transfer(transfer):
    """At a zero input without biases the sparse coefficients are exactly zero; softmax's are uniform."""
    plain = {"use_bias": False, "position_bias": "none", "norm": "rms", "target_length": 4}
    inputs = some_inputs()
    inputs[:, -4:] = -1  # the whole target is unobserved
    for mixer, expected in (("sparse_coding", 0.0), ("softmax", 1 / 12)):
        model = small(mixer=mixer, threshold=0.01, **plain)
        target = model(inputs, output_attentions=True).attentions[0][:, :, -4:]
        torch.testing.assert_close(target, torch.full_like(target, expected), rtol=1e-6, atol=0)
        assert model(inputs).logits.abs().max() == 0 or mixer == "softmax"
    lifted = small(mixer="sparse_coding", threshold=0.01, transfer=transfer, **plain)
    assert (lifted(inputs, output_attentions=True).attentions[0][:, :, -4:] != 0).float().mean() > 0.2
    assert (lifted(inputs).logits != 0).all()


def test_lambda_of_zero_transfers_nothing():
    for transfer in ("paper", "aligned"):
        torch.manual_seed(0)
        without = SparseTransformerForTokenClassification(SparseTransformerConfig(**SMALL))
        torch.manual_seed(0)
        fresh = SparseTransformerForTokenClassification(SparseTransformerConfig(**SMALL, transfer=transfer))
        assert torch.equal(fresh(some_inputs()).logits, without(some_inputs()).logits)


def test_learned_thresholds_start_as_configured_and_scale():
    fixed = small(mixer="sparse_coding", threshold=0.4)
    for kind, count in (("layer", 1), ("head", 3)):
        learned = small(mixer="sparse_coding", threshold=0.4, threshold_type=kind)
        assert sum(p.numel() for p in learned.parameters()) == sum(p.numel() for p in fixed.parameters()) + 2 * count
        learned.load_state_dict(fixed.state_dict(), strict=False)
        torch.testing.assert_close(learned(some_inputs()).logits, fixed(some_inputs()).logits)
    half = small(mixer="sparse_coding", threshold=0.2)
    half.load_state_dict(fixed.state_dict())
    assert torch.equal(half(some_inputs()).logits, fixed(some_inputs(), threshold_scale=0.5).logits)


def test_the_last_hidden_state_can_be_cut_short():
    model = small(transfer="aligned")
    whole, cut = (model.model(some_inputs(), last=last).last_hidden_state for last in (None, 2))
    assert whole.shape == (3, 12, 16)
    torch.testing.assert_close(cut, whole[:, -2:])


def test_patches_by_hand_and_back():
    images = torch.arange(2 * 3 * 4 * 4).float().view(2, 3, 4, 4)
    patches = to_patches(images, 2)
    assert patches.shape == (2, 12, 4)
    assert patches[0, 1].tolist() == [2, 3, 6, 7]  # top right
    assert patches[0, 2].tolist() == [8, 9, 12, 13]  # bottom left
    assert patches[0, 4].tolist() == [16, 17, 20, 21]  # the second picture's first
    assert torch.equal(from_patches(patches, 4), images)


def test_image_regression_draws_and_learns():
    torch.manual_seed(0)
    model = small(kind=SparseTransformerForImageRegression, **IMAGES)
    images, labels = torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8)
    output = model(images, labels=labels)
    assert output.logits.shape == (2, 1, 8, 8)
    torch.testing.assert_close(output.loss, (output.logits - labels).square().mean())
    model.config.image_loss = "log_mse"
    errors = [((drawn - label) ** 2).mean() for drawn, label in zip(output.logits, labels, strict=True)]
    expected = sum(torch.log(error + 1e-4) for error in errors) / 2
    torch.testing.assert_close(model(images, labels=labels).loss, expected)


def test_continuous_inputs_are_tokens():
    one_hot = small()
    continuous = small(input_type="continuous", input_size=5)
    vectors = torch.nn.functional.one_hot(some_inputs() + 1, 6)[..., 1:].float()
    assert torch.equal(continuous(vectors).logits, one_hot(some_inputs()).logits)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForTokenClassification, AutoModelForImageToImage])
def test_saves_and_loads_through_the_auto_classes(tmp_path, auto):
    kinds = {AutoModel: SparseTransformerModel, AutoModelForImageToImage: SparseTransformerForImageRegression}
    kind = kinds.get(auto, SparseTransformerForTokenClassification)
    options = IMAGES if auto is AutoModelForImageToImage else {}
    inputs = torch.rand(2, 3, 8, 8) if options else some_inputs()
    model = small(kind=kind, mixer="sparse_coding", transfer="aligned", threshold_type="head", **options)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    saved = {**AutoConfig.from_pretrained(tmp_path).to_dict(), "_name_or_path": ""}
    assert saved == model.config.to_dict()
    loaded = auto.from_pretrained(tmp_path).eval()
    assert type(loaded) is kind
    assert torch.equal(loaded(inputs)[0], model(inputs)[0])


def test_loading_a_bare_model_into_one_with_a_head_keeps_its_weights(tmp_path):
    bare = small(kind=SparseTransformerModel)
    bare.save_pretrained(tmp_path)
    whole = SparseTransformerForTokenClassification.from_pretrained(tmp_path)
    assert torch.equal(whole.model(some_inputs())[0], bare(some_inputs())[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "softmix"}, "mixer must be one of softmax, sparse_coding, hyla, linear, got 'softmix'"),
        ({"threshold": -1.0}, "threshold must be >= 0 and finite, got -1.0"),
        (
            {"mixer": "sparse_coding", "threshold": 0, "threshold_type": "head"},
            "a learned threshold must start above 0",
        ),
        ({"sequence_length": 13}, "multiple of context_length, got 13 and 4"),
        ({"sequence_length": 4, "transfer": "paper"}, "needs a context before the target"),
        ({"target_length": 5}, "at most context_length (4), got 5"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"input_type": "patches", "patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"threshold": float("nan")}, "threshold must be >= 0 and finite, got nan"),
        ({"threshold": float("inf")}, "threshold must be >= 0 and finite, got inf"),
        ({"transfer_init": float("nan")}, "transfer_init must be finite, got nan"),
        ({"image_loss": "log_mse"}, "image_loss='log_mse' needs input_type='patches', got 'one_hot'"),
        ({"num_labels": 7}, "num_labels is num_values, got 7 and 5; set num_values"),
        ({"threshold_type": "head"}, "threshold_type='head' needs mixer='sparse_coding', got 'softmax'"),
        ({"transfer_stage": "scores"}, "needs transfer='paper' or 'aligned', got 'none'"),
        ({"input_type": "patches", "image_size": 9}, "multiple of patch_size, got 9 and 4"),
    ],
)
def test_configurations_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        SparseTransformerConfig(**{**SMALL, **options})


@pytest.mark.parametrize("xi", [1e-6, 0.3, 1000.0])
def test_learned_thresholds_start_where_they_should(xi):
    model = small(mixer="sparse_coding", threshold=xi, threshold_type="head")
    thresholds = model.model.layers[0].attention.threshold()
    torch.testing.assert_close(thresholds, torch.full_like(thresholds, xi))


def test_inputs_that_do_not_fit():
    model = small()
    with pytest.raises(ValueError, match="between -1 .* and 4, got values from 0 to 5"):
        model(torch.full((1, 12), 5) * torch.tensor([0] + [1] * 11))
    with pytest.raises(ValueError, match=r"shape \(1, 11\) are not batches of sequence_length=12"):
        model(torch.zeros(1, 11, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels must have shape \(3, 2\), got \(3, 3\)"):
        model(some_inputs(), labels=torch.zeros(3, 3, dtype=torch.long))
    images = small(kind=SparseTransformerForImageRegression, **IMAGES)
    with pytest.raises(ValueError, match=r"S a multiple of 4, got \(1, 3, 6, 6\)"):
        to_patches(torch.zeros(1, 3, 6, 6), 4)
    with pytest.raises(ValueError, match=r"pictures must have sides of 8, got \(1, 12, 4, 4\)"):
        images(torch.zeros(1, 12, 4, 4))
    with pytest.raises(ValueError, match="multiple of the 4 patches of a picture, got 3"):
        small(kind=SparseTransformerForImageRegression, **{**IMAGES, "target_length": 3})
    with pytest.raises(ValueError, match="image_loss must be one of mse, log_mse, got 'psnr'"):
        small(kind=SparseTransformerForImageRegression, image_loss="psnr", **IMAGES)
    with pytest.raises(ValueError, match="needs input_type='patches', got 'one_hot'"):
        small(kind=SparseTransformerForImageRegression)


def test_trains_with_trainer_on_its_data_set(tmp_path):
    task = SRaven(features=1, values=5)
    sizes = {"sequence_length": 9, "context_length": 3, "target_length": 1}
    model = small(mixer="sparse_coding", transfer="aligned", **sizes)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to="none"
    )
    # the loss is a mean: with the number of items in it, accumulated gradients would be too large
    trainer = Trainer(model, arguments, train_dataset=task.dataset(16, "train", seed=0).remove_columns("rules"))
    assert not trainer.model_accepts_loss_kwargs
    assert 0 < trainer.train().training_loss < 5


def test_outputs_follow_the_configuration():
    model = small(output_attentions=True, output_hidden_states=True)
    output = model(some_inputs())
    assert len(output.attentions) == 2
    assert len(output.hidden_states) == 3
    bare = model.model(some_inputs())
    assert torch.equal(bare.hidden_states[-1], bare.last_hidden_state)
    assert isinstance(model(some_inputs(), return_dict=False), tuple)
    assert model.config.num_labels == 5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_of_every_type(dtype):
    inputs = some_inputs().clamp(min=0)
    model = small()
    assert torch.equal(model(inputs.to(dtype)).logits, model(inputs).logits)


def test_meta_device_and_no_problems():
    model = small(mixer="sparse_coding", transfer="aligned", score_norm="heads")
    assert model(torch.zeros(0, 12, dtype=torch.long)).logits.shape == (0, 2, 5)
    assert model.to("meta")(some_inputs().to("meta")).logits.shape == (3, 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_compiles_as_one_graph(mixer):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        model = small(mixer=mixer, transfer="aligned", transfer_per_head=True)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(some_inputs()).logits, model(some_inputs()).logits, rtol=1e-4, atol=1e-5)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_one_hot_inputs_are_whole_numbers():
    with pytest.raises(ValueError, match="one-hot inputs are whole numbers, got torch.float32; vectors need"):
        small()(some_inputs().float())


def test_bfloat16_survives_saving(tmp_path):
    model = small(mixer="sparse_coding", transfer="aligned", threshold_type="layer").bfloat16()
    model.save_pretrained(tmp_path)
    loaded = SparseTransformerForTokenClassification.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(some_inputs()).logits, model(some_inputs()).logits)


FUSED = {"mixer": "sparse_coding", "position_bias": "none"}


@pytest.mark.parametrize("transfer", ["none", "paper"])
@pytest.mark.parametrize("threshold_type", ["fixed", "layer", "head"])
def test_fused_attention_is_the_same_function(transfer, threshold_type):
    options = {"transfer": transfer, "threshold_type": threshold_type, "threshold": 0.07, **FUSED}
    explicit, fused = (small(fused_attention=value, **options).double() for value in (False, True))
    labels = torch.tensor([[1, 2]] * 3)
    outputs = [model(some_inputs(), labels, threshold_scale=0.5) for model in (explicit, fused)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    for output in outputs:
        output.loss.backward()
    for (name, one), other in zip(explicit.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name)
        assert one.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "linear"},
        {"score_norm": "keys"},
        {"position_bias": "past"},
        {"transfer": "aligned"},
        {"transfer": "paper", "transfer_stage": "scores"},
    ],
)
def test_fused_attention_refuses_what_the_kernel_does_not_know(options):
    with pytest.raises(ValueError, match="fused_attention needs mixer"):
        SparseTransformerConfig(**{**SMALL, **FUSED, "fused_attention": True, **options})


def test_fused_attention_shows_coefficients_when_asked(tmp_path):
    small(transfer="paper", threshold=0.05, **FUSED).save_pretrained(tmp_path)
    load = SparseTransformerForTokenClassification.from_pretrained
    explicit, fused = (load(tmp_path, fused_attention=value) for value in (False, True))
    expected, shown = (model(some_inputs(), output_attentions=True) for model in (explicit, fused))
    torch.testing.assert_close(shown.attentions, expected.attentions)
    torch.testing.assert_close(fused(some_inputs()).logits, expected.logits)
    fused.config.mixer = "softmax"
    with pytest.raises(ValueError, match="fused_attention needs mixer"):
        fused(some_inputs())
