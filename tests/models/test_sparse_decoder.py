import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparsecoding.models import SparseDecoderConfig, SparseDecoderForCausalLM
from hf_sparsecoding.models.sparse_decoder.positions import alibi_slopes, relative_buckets, rotate
from hf_sparsecoding.ops import reference


MIXERS = ("softmax", "sparse_coding", "top_k")
POSITIONS = ("none", "learned", "rope", "relative", "alibi")


def make_model(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {"vocab_size": 11, "max_position": 20, "threshold": 0.5, "kept_keys": 3, **sizes, **options}
    return SparseDecoderForCausalLM(SparseDecoderConfig(**options)).eval()


def make_batch(batch=3, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(11, (batch, length), generator=generator),
        torch.randint(21, (batch, length), generator=generator),
    )


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_is_causal_and_the_cache_changes_nothing(mixer, positions):
    model = make_model(mixer=mixer, positions=positions, relative_buckets=6, relative_distance=8)
    tokens, ids = make_batch()
    with torch.no_grad():
        if positions == "relative":
            model.model.layers[0].attention.relative_bias.normal_()
        whole = model(tokens, ids).logits
        other = model(torch.cat([tokens[:, :5], (tokens[:, 5:] + 1) % 11], 1), ids).logits
        torch.testing.assert_close(other[:, :5], whole[:, :5])
        assert not torch.allclose(other[:, 5:], whole[:, 5:])
        first = model(tokens[:, :4], ids[:, :4], use_cache=True)
        second = model(tokens[:, 4:8], ids[:, 4:8], past_key_values=first.past_key_values)
        third = model(tokens[:, 8:], ids[:, 8:], past_key_values=second.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits, third.logits], 1), whole)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_on_the_left_changes_nothing(mixer, positions):
    model = make_model(mixer=mixer, positions=positions)
    tokens, ids = make_batch(2, 6)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2)
    with torch.no_grad():
        plain = model(tokens, ids).logits
        padded = model(
            torch.cat([tokens[:, :3], tokens], 1), torch.cat([ids[:, :3], ids], 1), attention_mask=mask
        ).logits
    torch.testing.assert_close(padded[:, 3:], plain)


@pytest.mark.parametrize("positions", ["none", "alibi"])
def test_sparse_coefficients_are_the_formula(positions):
    model = make_model(mixer="sparse_coding", positions=positions, num_hidden_layers=1).double()
    tokens, _ = make_batch()
    alpha = model(tokens, output_attentions=True).attentions[0]
    attention = model.model.layers[0].attention
    hidden = model.model.layers[0].input_norm(model.model.embedding(tokens))
    query, key, _ = attention.qkv_proj(hidden).view(3, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
    for t in range(9):
        scores = query[:, :, t, None] @ key[:, :, : t + 1].mT / 8**0.5
        scores = reference.rms_normalised(scores[:, :, 0], -1, 1e-6)
        xi = torch.full((2, t + 1), 0.5, dtype=torch.float64)
        if positions == "alibi":
            xi = xi + torch.tensor([2.0**-4, 2.0**-8])[:, None] * (t - torch.arange(t + 1))
        expected = reference.coefficients("soft_threshold", scores, threshold=xi)
        torch.testing.assert_close(alpha[:, :, t, : t + 1], expected)
        assert (alpha[:, :, t, t + 1 :] == 0).all()


def test_top_k_keeps_k():
    alpha = make_model(mixer="top_k").forward(*make_batch(), output_attentions=True).attentions[0]
    kept = (alpha > 0).sum(-1)
    assert torch.equal(kept, torch.arange(1, 10).clamp(max=3).expand(kept.shape))
    torch.testing.assert_close(alpha.sum(-1), torch.ones(3, 2, 9))


def test_rotary_scores_depend_on_distances_only():
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def score(t, s):
        rotated = [rotate(v[None], torch.tensor([place]), 10000.0)[0] for v, place in ((query, t), (key, s))]
        return rotated[0] @ rotated[1]

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-5, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3
    torch.testing.assert_close(rotate(query[None], torch.tensor([0]), 10000.0)[0], query)


def test_relative_buckets_are_exact_nearby_and_logarithmic_further_off():
    buckets = relative_buckets(torch.arange(-2, 300)[None], 8, 64)[0, 2:].tolist()
    assert buckets[:5] == [0, 1, 2, 3, 4]
    assert buckets[8] == 5 and buckets[16] == 6 and buckets[32] == 7 and buckets[299] == 7
    assert buckets == sorted(buckets)


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


def test_loss_is_that_of_both_heads_and_the_penalty():
    model = make_model(predict_positions=True, l1_penalty=0.1, mixer="sparse_coding")
    tokens, ids = make_batch()
    labels, position_labels = make_batch(seed=1)
    labels[:, :4] = position_labels[:, :4] = -100
    output = model(tokens, ids, labels, position_labels, output_attentions=True)
    entropy = torch.nn.functional.cross_entropy
    expected = entropy(output.logits[:, 4:].flatten(0, 1), labels[:, 4:].flatten())
    expected = expected + entropy(output.position_logits[:, 4:].flatten(0, 1), position_labels[:, 4:].flatten())
    sums = torch.stack([alpha[:, :, 4:].abs().sum(-1).mean() for alpha in output.attentions]).mean()
    torch.testing.assert_close(output.loss, expected + 0.1 * sums)
    with pytest.raises(ValueError, match="needs position_labels beside labels"):
        model(tokens, ids, labels)


@pytest.mark.parametrize("options", [{"mixer": m, "positions": p} for m in MIXERS for p in POSITIONS])
def test_every_parameter_gets_a_gradient(options):
    learned = options["positions"] == "learned"
    trained = options["mixer"] == "sparse_coding"
    model = make_model(**options, predict_positions=learned, train_threshold=trained)
    tokens, ids = make_batch()
    model(tokens, ids, *make_batch(seed=1)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("options", [{}, {"predict_positions": True}, {"positions": "rope"}])
def test_greedy_decoding_equals_the_forward_pass_token_by_token(options):
    model = make_model(**options)
    learned = "positions" not in options
    tokens, ids = make_batch(2, 4)
    decoded = model.greedy(tokens, ids if learned else None, max_new_tokens=5)
    for step in range(5):
        output = model(tokens, ids if learned else None)
        chosen = output.logits[:, -1:].argmax(-1)
        following = ids[:, -1:] + 1
        if options.get("predict_positions"):
            following = output.position_logits[:, -1:].argmax(-1)
        assert torch.equal(decoded.tokens[:, step : step + 1], chosen)
        if learned:
            assert torch.equal(decoded.position_ids[:, step : step + 1], following.clamp(max=20))
        tokens, ids = torch.cat([tokens, chosen], 1), torch.cat([ids, following.clamp(max=20)], 1)


def test_counted_positions_go_on_at_one():
    """As the ids of a cyclic task do; the greatest id is repeated otherwise."""
    tokens, ids = make_batch(2, 4)
    ids[:] = torch.tensor([[16, 17, 18, 19], [3, 4, 5, 6]])
    for cyclic, expected in ((False, [20, 20, 20]), (True, [20, 1, 2])):
        model = make_model(cyclic_positions=cyclic)
        assert model.greedy(tokens, ids, 3).position_ids.tolist() == [expected, [7, 8, 9]]


def test_greedy_decoding_takes_given_ids_and_stops_at_the_end():
    model = make_model(predict_positions=True)
    tokens, ids = make_batch(2, 4)
    given = make_batch(2, 6, seed=3)[1]
    assert torch.equal(model.greedy(tokens, ids, 6, given_position_ids=given).position_ids, given)
    with torch.no_grad():
        model.head.weight[:, :] = 0
    # all logits are equal: token 0 is the first of the largest
    assert model.greedy(tokens, ids, 6, eos_token_id=0).tokens.shape == (2, 1)
    assert model.greedy(tokens, ids, 6, eos_token_id=1).tokens.shape == (2, 6)


@pytest.mark.parametrize("threshold", [0.7, 1_000.0])
def test_learned_thresholds_start_as_configured(threshold):
    model = make_model(mixer="sparse_coding", train_threshold=True, threshold=threshold)
    torch.testing.assert_close(model.model.layers[0].attention.threshold(), torch.full((2, 1, 1), threshold))


def test_the_vocabulary_can_be_resized():
    model = make_model()
    tokens, ids = make_batch()
    expected, size = model(tokens, ids).logits, model.config.vocab_size
    model.resize_token_embeddings(size + 4)
    assert model.head.out_features == model.model.embedding.num_embeddings == model.config.vocab_size == size + 4
    torch.testing.assert_close(model(tokens, ids).logits[..., :size], expected)


def test_generate_names_greedy():
    with pytest.raises(NotImplementedError, match="generates with greedy"):
        make_model().generate(*make_batch())


def test_saves_and_loads_through_the_auto_class(tmp_path):
    model = make_model(mixer="sparse_coding", positions="relative")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SparseDecoderForCausalLM)
    torch.testing.assert_close(loaded(*make_batch()).logits, model(*make_batch()).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "hyla"}, "mixer must be one of softmax, sparse_coding, top_k, got 'hyla'"),
        ({"positions": "coupled"}, "positions must be one of none, learned, rope, relative, alibi, got 'coupled'"),
        ({"threshold": -1}, "threshold must be at least 0 and finite, got -1"),
        ({"threshold": float("inf")}, "threshold must be at least 0 and finite, got inf"),
        ({"l1_penalty": float("nan")}, "l1_penalty must be at least 0 and finite, got nan"),
        ({"kept_keys": 0}, "kept_keys must be at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"train_threshold": True}, "train_threshold needs mixer='sparse_coding'"),
        ({"predict_positions": True, "positions": "rope"}, "predict_positions needs positions='learned', got 'rope'"),
        ({"positions": "rope", "head_dim": 3}, "needs an even head_dim, got 3"),
        ({"relative_distance": 16}, "relative_distance above half of them, got 32 and 16"),
    ],
)
def test_configurations_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        SparseDecoderConfig(**options)


def test_inputs_that_do_not_fit():
    model = make_model()
    tokens, ids = make_batch()
    with pytest.raises(ValueError, match=r"needs position_ids of shape \(3, 9\), got None"):
        model(tokens)
    with pytest.raises(ValueError, match=r"attention_mask must be \[3, 9\], with the 0 tokens in the cache"):
        model(tokens, ids, attention_mask=torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"labels must have shape \(3, 9\), got \(3, 8\)"):
        model(tokens, ids, labels=tokens[:, 1:])


FUSED = {"mixer": "sparse_coding", "score_norm": "none"}


@pytest.mark.parametrize("positions", ["none", "learned", "rope"])
@pytest.mark.parametrize("train_threshold", [False, True])
def test_fused_attention_is_the_same_function(positions, train_threshold):
    # thresholds that float32 does not hold; tokens of five tiles, some of them empty
    options = {"positions": positions, "train_threshold": train_threshold, "threshold": 1.3, **FUSED}
    explicit, fused = (make_model(fused_attention=value, **options).double() for value in (False, True))
    tokens, ids = make_batch(2, 530)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    outputs = [model(tokens, ids, labels=tokens, attention_mask=mask) for model in (explicit, fused)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    for output in outputs:
        output.loss.backward()
    for one, other in zip(explicit.parameters(), fused.parameters(), strict=True):
        assert one.grad.abs().sum() > 0
        torch.testing.assert_close(other.grad, one.grad)


def test_fused_attention_decodes_with_a_cache():
    tokens, ids = make_batch()
    explicit, fused = (make_model(fused_attention=value, **FUSED) for value in (False, True))
    expected, decoded = (model.greedy(tokens, ids, max_new_tokens=6) for model in (explicit, fused))
    assert torch.equal(decoded.tokens, expected.tokens)
    with torch.no_grad():
        whole = fused(tokens, ids).logits
        first = fused(tokens[:, :4], ids[:, :4], use_cache=True)
        mask = torch.ones(3, 9, dtype=torch.long)
        rest = fused(tokens[:, 4:], ids[:, 4:], past_key_values=first.past_key_values, attention_mask=mask)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)


def test_fused_attention_thresholds_alike_under_autocast():
    model = make_model(fused_attention=True, **FUSED)
    tokens, ids = make_batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens, ids).logits
        first = model(tokens[:, :-1], ids[:, :-1], use_cache=True)
        last = model(tokens[:, -1:], ids[:, -1:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last, whole[:, -1:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "softmax"},
        {"score_norm": "keys"},
        {"output_norm": "length"},
        {"positions": "alibi"},
        {"l1_penalty": 0.1},
    ],
)
def test_fused_attention_refuses_what_the_kernel_does_not_know(options):
    with pytest.raises(ValueError, match="fused_attention needs mixer"):
        SparseDecoderConfig(**{**FUSED, "fused_attention": True, **options})


def test_fused_attention_shows_coefficients_when_asked():
    tokens, ids = make_batch()
    explicit, fused = (make_model(fused_attention=value, **FUSED) for value in (False, True))
    expected, shown = (model(tokens, ids, output_attentions=True) for model in (explicit, fused))
    torch.testing.assert_close(shown.attentions, expected.attentions)
    torch.testing.assert_close(shown.logits, fused(tokens, ids).logits)


def test_fused_attention_of_a_saved_model(tmp_path):
    make_model(output_norm="head", **FUSED).save_pretrained(tmp_path / "fits")
    make_model(mixer="sparse_coding").save_pretrained(tmp_path / "does not")
    tokens, ids = make_batch()
    load = SparseDecoderForCausalLM.from_pretrained
    explicit, fused = (load(tmp_path / "fits", fused_attention=value) for value in (False, True))
    assert fused.config.fused_attention and fused.config.output_norm == "head"
    torch.testing.assert_close(fused(tokens, ids).logits, explicit(tokens, ids).logits)
    with pytest.raises(ValueError, match="fused_attention needs mixer"):
        load(tmp_path / "does not", fused_attention=True)(tokens, ids)


def test_a_threshold_that_no_row_reaches_is_refused():
    with pytest.raises(ValueError, match="score_norm='row' needs a threshold below 1, its largest score, got 1.0"):
        SparseDecoderConfig(mixer="sparse_coding", score_norm="row")


@pytest.mark.parametrize("positions", ["learned", "alibi"])
def test_row_norm_with_a_cache_and_padding(positions):
    model = make_model(mixer="sparse_coding", score_norm="row", threshold=0.2, positions=positions)
    tokens, ids = make_batch()
    with torch.no_grad():
        whole = model(tokens, ids).logits
        mask = torch.tensor([[0, 0] + [1] * 9] * 3)
        padded = [torch.cat([values[:, :2], values], 1) for values in (tokens, ids)]
        first = model(padded[0][:, :5], padded[1][:, :5], attention_mask=mask[:, :5], use_cache=True)
        rest = model(padded[0][:, 5:], padded[1][:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits[:, 2:], rest.logits], 1), whole)


@pytest.mark.parametrize("fused_attention", [False, True])
def test_output_norms_are_what_they_are_called(fused_attention):
    tokens, ids = make_batch()
    options = {**FUSED, "num_hidden_layers": 1, "threshold": 0.0}
    models = {name: make_model(output_norm=name, **options) for name in ("none", "length")}
    models["head"] = make_model(output_norm="head", fused_attention=fused_attention, **options)
    outputs = {}
    for name, model in models.items():
        model.model.layers[0].attention.o_proj.register_forward_pre_hook(
            lambda _, inputs, name=name: outputs.update({name: inputs[0].unflatten(-1, (2, 8))})
        )
        model(tokens, ids)
    keys = torch.arange(1, 10)[:, None, None]
    torch.testing.assert_close(outputs["length"], outputs["none"] / keys.sqrt())
    root = outputs["none"].square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(outputs["head"], outputs["none"] / root)


def test_output_norm_follows_what_grows_with_the_length():
    assert SparseDecoderConfig(mixer="sparse_coding").output_norm == "length"
    assert SparseDecoderConfig(mixer="sparse_coding", score_norm="none").output_norm == "none"
    assert SparseDecoderConfig(mixer="softmax").output_norm == "none"
    assert SparseDecoderConfig(mixer="sparse_coding", output_norm="head").output_norm == "head"


def test_row_norm_does_not_depend_on_keys_without_a_score():
    model = make_model(mixer="sparse_coding", score_norm="row", threshold=0.25)
    layout = model.model.layout(torch.zeros(1, 4, dtype=torch.long), None, None)
    scores = torch.tensor([[3.0, -4.0, 0.0, 0.0]], dtype=torch.float64).expand(1, 1, 4, 4)
    alpha = model.model.layers[0].attention.coefficients(scores, layout)[0, 0]
    expected = torch.tensor([0.35, -0.55, 0.0, 0.0], dtype=torch.float64).expand(3, 4)
    torch.testing.assert_close(alpha[1:], expected, atol=1e-6, rtol=0)
