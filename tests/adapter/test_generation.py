"""Generation with a cache gives the texts and scores of the full forward, in every mode of `generate`."""

import copy

import jaxtyping
import pytest
import torch
from peft import PeftModel
from transformers import CompileConfig, DynamicCache, StaticCache

from tests.tiny_models import adapted, tiny_model, tokens


NEW_TOKENS = 10

# more than a quarter of the vocabulary ends a segment, so that prompts and continuations have several
SEGMENTS = {"contexts": "segments", "segment_token_ids": list(range(3, 20))}
KINDS = {
    "lags": {"lags": [1, 2, 5]},
    "segments": SEGMENTS,
    "target coefficient": {"num_contexts": 2, "target_coefficient": True, "per_head": False},
    "thresholded softmax": {"coefficients": "thresholded_softmax", "threshold": 0.05},
    "segments, soft threshold": {**SEGMENTS, "coefficients": "soft_threshold", "threshold": 0.05},
}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind) -> PeftModel:
    return adapted(tiny_model(), **KINDS[kind])


def mode(name: str):
    """Mark a test as the column `name` of the generation modes, with the kind of adapter as its row."""
    return pytest.mark.compatibility("generation", name, row="kind")


def generate(model, inputs=None, seed=0, **arguments):
    arguments = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_logits": True,
        **arguments,
    }
    if inputs is not None:
        arguments["input_ids"] = inputs
        # or transformers takes generated pad ids for padding
        arguments.setdefault("attention_mask", torch.ones_like(inputs))
    torch.manual_seed(seed)
    return model.generate(**arguments)


def assert_same(output, expected, message: str = "") -> None:
    assert output.sequences.tolist() == expected.sequences.tolist(), message
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


@mode("greedy")
def test_greedy(model, record_property):
    record_property("trainable_parameters", model.get_nb_trainable_parameters()[0])
    prompt = tokens(2, 9)
    cached = generate(model, prompt)
    assert_same(cached, generate(model, prompt, use_cache=False))
    with model.disable_adapter():
        assert generate(model, prompt).sequences.tolist() != cached.sequences.tolist()


@mode("beam search")
def test_beam_search(model):
    # with an end token, so that beams finish at different times
    arguments = {"num_beams": 4, "num_return_sequences": 3, "eos_token_id": [2, 30, 31], "output_scores": True}
    cached = generate(model, tokens(2, 9), **arguments)
    full = generate(model, tokens(2, 9), use_cache=False, **arguments)
    assert cached.sequences.tolist() == full.sequences.tolist()
    torch.testing.assert_close(cached.sequences_scores, full.sequences_scores)


@mode("sampling")
def test_sampling(model):
    arguments = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
    cached = generate(model, tokens(2, 9), **arguments)
    assert len(set(map(tuple, cached.sequences.tolist()))) == 6
    assert_same(cached, generate(model, tokens(2, 9), use_cache=False, **arguments))


@mode("beam sampling")
def test_beam_sampling(model):
    arguments = {"do_sample": True, "num_beams": 3, "temperature": 1.5}
    cached = generate(model, tokens(2, 9), **arguments)
    assert cached.sequences.tolist() == generate(model, tokens(2, 9), use_cache=False, **arguments).sequences.tolist()


def left_padded(lengths: list[int], total: int) -> dict[str, torch.Tensor]:
    ids, mask = tokens(len(lengths), total), torch.ones(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : total - length] = 0
        mask[row, : total - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


@mode("left padding")
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_left_padding(model, static):
    lengths, total = [9, 1, 4], 9
    batch = left_padded(lengths, total)
    arguments = {"cache_implementation": "static"} if static else {}
    together = generate(model, **batch, **arguments)
    assert_same(together, generate(model, **batch, use_cache=False))
    for row, length in enumerate(lengths):
        alone = generate(model, batch["input_ids"][row : row + 1, total - length :])
        assert together.sequences[row, total:].tolist() == alone.sequences[0, length:].tolist()
        logits = torch.stack(together.logits)[:, row : row + 1]
        torch.testing.assert_close(logits, torch.stack(alone.logits), atol=1e-4, rtol=1e-4)


@mode("left padding")
def test_left_padding_with_beams(model):
    batch = left_padded([9, 3], 9)
    together = generate(model, **batch, num_beams=3)
    for row, length in enumerate([9, 3]):
        alone = generate(model, batch["input_ids"][row : row + 1, 9 - length :], num_beams=3)
        assert together.sequences[row, 9:].tolist() == alone.sequences[0, length:].tolist()


@mode("static cache")
def test_static_cache(model):
    expected = generate(model, tokens(2, 9), use_cache=False)
    assert_same(generate(model, tokens(2, 9), cache_implementation="static"), expected)
    # one token, and more tokens than the deepest context
    for length in (1, 30):
        prompt = tokens(1, length)
        expected = generate(model, prompt, use_cache=False)
        assert_same(generate(model, prompt, cache_implementation="static"), expected, f"{length} tokens")


@pytest.fixture
def _compiler(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    torch._dynamo.reset()


def compiled(backend: str) -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # or transformers compiles on accelerators only
    return config


@mode("compiled static cache")
@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("_compiler")
def test_compiled_decoding(kind, backend):
    model = adapted(tiny_model(num_hidden_layers=1), **KINDS[kind])
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    arguments = {"cache_implementation": "static", "compile_config": compiled(backend)}
    output = generate(model, tokens(2, 9), **arguments)
    assert_same(output, generate(model, tokens(2, 9), use_cache=False))
    assert graphs["unique_graphs"] == before + 1, "one graph for all steps"
    # the same graph on a cache that was used
    again = generate(model, tokens(2, 9, seed=1), **arguments)
    assert_same(again, generate(model, tokens(2, 9, seed=1), use_cache=False))


@mode("assisted decoding")
@pytest.mark.parametrize("assistant", ["own base", "another"])
def test_assisted_decoding(model, assistant):
    # the base model's guesses are in part taken, those of another random model mostly taken back
    helper = tiny_model() if assistant == "own base" else tiny_model(seed=7, num_hidden_layers=1)
    expected = generate(model, tokens(1, 9), max_new_tokens=24, use_cache=False)
    assert_same(generate(model, tokens(1, 9), max_new_tokens=24, assistant_model=helper), expected)


@mode("prompt lookup")
def test_prompt_lookup(model):
    prompt = tokens(1, 5).repeat(1, 4)
    expected = generate(model, prompt, max_new_tokens=24, use_cache=False)
    assert_same(generate(model, prompt, max_new_tokens=24, prompt_lookup_num_tokens=4), expected)


@mode("several turns")
def test_a_returned_cache_continues_the_conversation(model):
    texts, cache = tokens(1, 9), None
    for turn in range(2):
        output = generate(model, texts, past_key_values=cache)
        assert_same(output, generate(model, texts, use_cache=False), f"turn {turn}")
        texts, cache = torch.cat([output.sequences, tokens(1, 4, seed=turn + 1)], 1), output.past_key_values
    # beams need a row of the cache each
    cache.batch_repeat_interleave(3)
    output = generate(model, texts, past_key_values=cache, num_beams=3)
    assert output.sequences.tolist() == generate(model, texts, use_cache=False, num_beams=3).sequences.tolist()


@mode("several turns")
def test_turns_of_a_left_padded_batch(model):
    batch = left_padded([6, 3], 6)
    ids, mask, cache = batch["input_ids"], batch["attention_mask"], None
    for turn in range(3):
        output = generate(model, ids, attention_mask=mask, past_key_values=cache)
        assert_same(output, generate(model, ids, attention_mask=mask, use_cache=False), f"turn {turn}")
        ids = torch.cat([output.sequences, tokens(2, 3, seed=turn + 1)], 1)
        mask = torch.cat([mask, mask.new_ones(2, NEW_TOKENS + 3)], 1)
        cache = output.past_key_values


@mode("several turns")
def test_a_shared_prompt_is_computed_once(model):
    """The recipe of transformers' documentation: fill a cache with a system prompt, copy it for each question."""
    system = tokens(1, 8)
    with torch.no_grad():
        cache = model(system, use_cache=True).past_key_values
    for seed in (1, 2):
        prompt = torch.cat([system, tokens(1, 4, seed=seed)], 1)
        output = generate(model, prompt, past_key_values=copy.deepcopy(cache))
        assert_same(output, generate(model, prompt, use_cache=False))


@mode("chunked prefill")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prefill(model, cache):
    arguments = {"cache_implementation": "static"} if cache == "static" else {}
    expected = generate(model, tokens(2, 13), use_cache=False)
    output = generate(model, tokens(2, 13), prefill_chunk_size=4, **arguments)
    assert_same(output, expected)
    batch = left_padded([13, 5], 13)
    output = generate(model, **batch, prefill_chunk_size=4, **arguments)
    assert_same(output, generate(model, **batch, use_cache=False), "left padding")


@mode("given caches")
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_an_empty_cache_may_be_given_and_used_again(model, cache_class):
    arguments = {"max_cache_len": 20} if cache_class is StaticCache else {}
    cache = cache_class(config=model.config, **arguments)
    for seed in (0, 1):
        output = generate(model, tokens(2, 9, seed), past_key_values=cache)
        assert_same(output, generate(model, tokens(2, 9, seed), use_cache=False))
        cache.reset()


@mode("token by token")
def test_a_loop_of_ones_own(model):
    """Forwards of uneven lengths over the same text, without masks or positions."""
    ids = tokens(2, 14)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        for cuts in ([1] * 14, [5, 1, 1, 7], [2, 3, 9]):
            cache, pieces = None, []
            for piece in ids.split(cuts, 1):
                output = model(piece, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                pieces.append(output.logits)
            torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-4, rtol=1e-4)


def test_a_mask_as_long_as_the_static_cache(model):
    """Its columns for tokens to come are zeros; the new tokens' are not the last ones."""
    ids, lengths = tokens(2, 8), [0, 2]
    mask = torch.zeros(2, 16, dtype=torch.long)
    with torch.no_grad():
        for row, padding in enumerate(lengths):
            mask[row, padding:8] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :8]
        full = model(ids, attention_mask=mask[:, :8], position_ids=positions, use_cache=False).logits
        cache, pieces = StaticCache(config=model.config, max_cache_len=16), []
        for begin, end in ((0, 5), (5, 6), (6, 8)):
            seen = mask.clone()
            seen[:, end:] = 0
            output = model(
                ids[:, begin:end], attention_mask=seen, position_ids=positions[:, begin:end], past_key_values=cache
            )
            pieces.append(output.logits)
    actual = torch.cat(pieces, 1)
    for row, padding in enumerate(lengths):
        torch.testing.assert_close(actual[row, padding:], full[row, padding:], atol=1e-4, rtol=1e-4)


def test_prompts_as_embeddings(kind, model):
    prompt = tokens(2, 9)
    embeddings = model.get_input_embeddings()(prompt)
    if "segments" in kind:
        with pytest.raises(ValueError, match="segment_token_ids need input_ids"):
            generate(model, inputs_embeds=embeddings)
        return
    output = generate(model, inputs_embeds=embeddings)
    expected = generate(model, prompt, use_cache=False)
    assert output.sequences.tolist() == expected.sequences[:, 9:].tolist()


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_given_segments_are_decoded_step_by_step(cache_class):
    model = adapted(tiny_model(), contexts="segments")
    ids = tokens(2, 12)
    segments = torch.tensor([[7, 7, 7, 1, 1, 1, 1, 5, 5, 5, 9, 9], [0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 5, 5]])
    with torch.no_grad():
        full = model(ids, segment_ids=segments, use_cache=False).logits
        cache = cache_class(config=model.config, **({"max_cache_len": 16} if cache_class is StaticCache else {}))
        pieces = [
            model(ids[:, a:b], segment_ids=segments[:, a:b], past_key_values=cache).logits
            for a, b in [(0, 4), (4, 5), (5, 6), (6, 10), (10, 11), (11, 12)]
        ]
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-4, rtol=1e-4)


def test_generate_says_that_it_cannot_take_segment_ids():
    model = adapted(tiny_model(), contexts="segments")
    with pytest.raises(ValueError, match="segment_ids"):
        generate(model, tokens(1, 4), segment_ids=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="pass segment_ids"):
        generate(model, tokens(1, 4))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["lags", "segments"], indirect=True)
@pytest.mark.usefixtures("_compiler")
def test_a_cache_made_inside_a_compiled_forward(model, backend):
    forward = torch.compile(model, fullgraph=True, backend=backend)
    ids, following = tokens(2, 9), tokens(2, 4, seed=1)
    output = forward(ids, use_cache=True)
    torch.testing.assert_close(output.logits, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    cache = output.past_key_values
    assert all(type(layer).__name__ == "DynamicLayerWithHistory" for layer in cache.layers)
    # the cache behaves like one that was made outside
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 1]))
    decoded = model(following, past_key_values=cache).logits
    full = model(torch.cat([ids[[1, 1], :-2], following], 1), use_cache=False).logits[:, -4:]
    torch.testing.assert_close(decoded, full, atol=1e-4, rtol=1e-4)
