"""Which token is whose context: nothing crosses padding or documents, in values and in gradients."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from hf_sparsecoding.adapter.contexts import document_age, number_segments, segment_distances
from hf_sparsecoding.ops.reference import context_rows, segment_rows
from tests.tiny_models import adapted, tiny_model, tokens


SEGMENT_ENDS = list(range(3, 20))
KINDS = {
    "lags": {"lags": [1, 3], "target_coefficient": True},
    "segments": {"contexts": "segments", "segment_token_ids": SEGMENT_ENDS},
    "given segments": {"contexts": "segments"},
    "thresholded softmax": {"lags": [1, 3], "coefficients": "thresholded_softmax", "threshold": 0.05},
}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["sdpa", "eager"])
def model(request, kind):
    return adapted(tiny_model(attn_implementation=request.param), **KINDS[kind])


def segments_of(ids: torch.Tensor) -> torch.Tensor:
    """Segment ids [B, T] that cut the text where `segment_token_ids` would."""
    ends = torch.isin(ids, torch.tensor(SEGMENT_ENDS)).long()
    return ends.cumsum(-1) - ends


def run(model, kind, ids, **arguments) -> torch.Tensor:
    if kind == "given segments":
        arguments["segment_ids"] = segments_of(ids)
    return model(ids, use_cache=False, **arguments).logits


def gradients(model, kind, ids, position, **arguments) -> torch.Tensor:
    """Size [T] of the gradient of the last token's logits with respect to each token's embedding."""
    given = segments_of(ids) if "segments" in kind else None
    if kind == "segments":  # embeddings have no ids to find the segments by
        model = adapted(tiny_model(attn_implementation=model.config._attn_implementation), contexts="segments")
    if given is not None:
        arguments["segment_ids"] = given
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, use_cache=False, **arguments).logits[:, position]
    return torch.autograd.grad(logits.square().sum(), embeddings)[0].abs().sum((0, 2))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, kind, side):
    lengths, total = [9, 1, 5, 3], 9
    ids, mask = tokens(4, total), torch.zeros(4, total, dtype=torch.long)
    places = [slice(total - n, total) if side == "left" else slice(0, n) for n in lengths]
    for row, place in enumerate(places):
        mask[row, place] = 1
    alone = [run(model, kind, ids[row : row + 1, place]) for row, place in enumerate(places)]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for arguments in ({"position_ids": positions}, {}):  # rotary positions are relative: without them it is the same
        for padding in (0, 4, 60):
            batch = torch.where(mask == 1, ids, padding)
            logits = run(model, kind, batch, attention_mask=mask, **arguments)
            for row, place in enumerate(places):
                torch.testing.assert_close(logits[row, place], alone[row][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_gradient_reaches_padding(model, kind, side):
    ids, mask = tokens(1, 9), torch.ones(1, 9, dtype=torch.long)
    padding = slice(0, 4) if side == "left" else slice(5, 9)
    mask[:, padding] = 0
    sizes = gradients(model, kind, ids, position=8 if side == "left" else 4, attention_mask=mask)
    assert torch.equal(sizes == 0, mask[0] == 0)


def test_padding_in_the_middle(model, kind):
    """As in a batch of conversations whose turns were padded: no context lies in or beyond the padding."""
    ids, mask = tokens(1, 10), torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    arguments = {"attention_mask": mask, "position_ids": positions}
    sizes = gradients(model, kind, ids, position=9, **arguments)
    assert torch.equal(sizes == 0, mask[0] == 0)
    other = torch.where(mask == 1, ids, 40)
    torch.testing.assert_close(run(model, kind, other, **arguments)[:, 6:], run(model, kind, ids, **arguments)[:, 6:])


DOCUMENTS = [7, 1, 2, 6, 1]


def test_packed_documents_are_as_alone(model, kind):
    documents = [tokens(1, length, seed) for seed, length in enumerate(DOCUMENTS)]
    packed = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": ids[0].tolist()} for ids in documents])
    logits = run(model, kind, packed["input_ids"], position_ids=packed["position_ids"])
    alone = torch.cat([run(model, kind, ids) for ids in documents], 1)
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_packed_documents_may_start_anywhere(model, kind):
    """Positions of a document count on from any number; rotary positions are relative."""
    documents = [tokens(2, length, seed) for seed, length in enumerate(DOCUMENTS)]
    starts = [torch.tensor([[4], [0]]), torch.tensor([[30], [9]]), 2, 17, torch.tensor([[3], [90]])]
    positions = [torch.arange(length).expand(2, -1) + start for length, start in zip(DOCUMENTS, starts, strict=True)]
    logits = run(model, kind, torch.cat(documents, 1), position_ids=torch.cat(positions, 1))
    alone = torch.cat([run(model, kind, ids) for ids in documents], 1)
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_no_gradient_reaches_another_document(model, kind):
    total, position = sum(DOCUMENTS), 7 + 1 + 2 + 5
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    sizes = gradients(model, kind, tokens(1, total), position, position_ids=positions)
    own = torch.zeros(total, dtype=torch.bool)
    own[10:16] = True
    assert torch.equal(sizes > 0, own)


def test_training_gradients_of_packed_documents(model, kind):
    """The trained numbers get the sum of what the documents give them alone."""
    documents = [tokens(1, length, seed) for seed, length in enumerate(DOCUMENTS)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradient(ids, **arguments):
        return torch.autograd.grad(run(model, kind, ids, **arguments).square().sum(), trained, allow_unused=True)

    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    packed = gradient(torch.cat(documents, 1), position_ids=positions)
    alone = [gradient(ids) for ids in documents]
    for number, value in enumerate(packed):
        torch.testing.assert_close(value, sum(one[number] for one in alone), atol=1e-3, rtol=1e-4)


def test_segment_ids_of_another_length():
    model = adapted(tiny_model(), contexts="segments")
    with pytest.raises(ValueError, match=r"shape of the tokens given with them, \[2, 5\], got \[2, 4\]"):
        model(tokens(2, 5), segment_ids=torch.zeros(2, 4, dtype=torch.long))


# Ages


def age(length, past=0, mask=None, positions=None):
    value = document_age(length, past, mask, positions, torch.device("cpu"))
    return None if value is None else value.tolist()


def test_age_of_plain_text():
    assert age(3) is None
    assert age(2, past=3) == [[3, 4]]
    assert age(2, past=torch.tensor(3)) == [[3, 4]]
    assert age(4, mask=torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()) == [[0, 1, 2, 3]] * 2
    assert age(2, past=2, mask=torch.zeros(1, 1, 2, 4)) == [[2, 3]]  # a float mask, all allowed


def test_age_under_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 1, 1]])
    assert age(5, mask=mask) == [[-1, -1, 0, 1, 2], [0, 1, 2, -1, -1], [0, 1, -1, 0, 1]]
    assert age(2, past=3, mask=mask) == [[1, 2], [-1, -1], [0, 1]]
    # positions of generate()
    assert age(5, mask=mask[:1], positions=torch.tensor([[0, 0, 0, 1, 2]])) == [[-1, -1, 0, 1, 2]]


def test_age_of_packed_documents():
    assert age(7, positions=torch.tensor([[5, 6, 7, 3, 4, 0, 1]])) == [[0, 1, 2, 0, 1, 0, 1]]
    # the first document goes on from the cache
    assert age(4, past=8, positions=torch.tensor([[8, 9, 0, 1]])) == [[8, 9, 0, 1]]
    assert age(1, past=20, positions=torch.tensor([[3], [20]])) == [[3], [20]]


def test_age_by_a_mask_with_biases():
    causal = torch.full((5, 5), -torch.inf).triu(1)
    causal[2:, :2] = torch.finfo(torch.float32).min  # a document starts at 2
    slopes = torch.tensor([0.5, 0.0]).view(2, 1, 1, 1)
    biases = -slopes * (torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0)
    assert age(5, mask=causal + biases) == [[0, 1, 0, 1, 2]] * 2


def test_age_by_positions_and_a_4d_mask():
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[2:, :2] = False
    mask = allowed[None, None]
    counted = torch.arange(5)[None]
    assert age(5, mask=mask, positions=counted) == [[0, 1, 0, 1, 2]]
    assert age(5, mask=mask, positions=torch.tensor([[0, 1, 2, 0, 1]])) == [[0, 1, 0, 0, 1]]
    # a window is no document: contexts beyond it are the cache's to keep
    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)[None, None]
    assert age(5, mask=window, positions=counted) == [[0, 1, 2, 3, 4]]


def test_positions_may_skip_ahead_beside_a_mask():
    """As transformers has it: without a mask such positions are documents of one token, with one they are not."""
    skipping = torch.tensor([[0, 2, 4, 9, 10, 0, 3]])
    assert age(7, positions=skipping) == [[0, 0, 0, 0, 1, 0, 0]]
    assert age(7, mask=torch.ones(1, 7, dtype=torch.long), positions=skipping) == [[0, 1, 2, 3, 4, 0, 1]]


def test_age_by_multimodal_positions():
    text = torch.tensor([[0, 1, 0, 1, 2]])
    assert age(5, positions=torch.stack([text, *torch.zeros(3, 1, 5, dtype=torch.long)])) == [[0, 1, 0, 1, 2]]


def random_documents(generator: torch.Generator, batch: int, length: int):
    """Documents one after another: the number of each token's own, -1 for left padding; and mask and positions."""
    owner = torch.rand(batch, length, generator=generator).lt(0.2).long().cumsum(-1)
    padding = torch.randint(0, length // 2, (batch, 1), generator=generator)
    owner = torch.where(torch.arange(length) < padding, -1, owner)
    positions = torch.zeros_like(owner)
    for row in range(batch):
        for t in range(1, length):
            same = owner[row, t] == owner[row, t - 1] and owner[row, t] >= 0
            positions[row, t] = positions[row, t - 1] + 1 if same else 0
    return owner, (owner >= 0).long(), positions


@pytest.mark.parametrize("seed", range(4))
def test_lags_against_the_documents(seed):
    generator = torch.Generator().manual_seed(seed)
    owner, mask, positions = random_documents(generator, batch=3, length=17)
    lags = [1, 2, 5, 40]
    rows = context_rows(17, lags, document_age(17, 0, mask, positions, owner.device))
    for b in range(3):
        for t in range(17):
            for i, lag in enumerate(lags):
                inside = t >= lag and owner[b, t - lag] == owner[b, t] >= 0
                assert rows[b, t, i] == (t - lag if inside else -1), (b, t, lag)


@pytest.mark.parametrize("by_end", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_segments_against_the_reference(seed, by_end):
    length, contexts = 23, 3
    generator = torch.Generator().manual_seed(seed)
    owner, mask, positions = random_documents(generator, batch=3, length=length)
    ages = document_age(length, 0, mask, positions, owner.device)
    marks = torch.rand(3, length, generator=generator).lt(0.3).long()
    if not by_end:  # ids that come again, and others than 0 and 1
        marks = torch.randint(0, 3, (3, length), generator=generator) * 7
        marks = torch.where(torch.rand(3, length, generator=generator) < 0.5, marks.roll(1, 1), marks)
    labels = marks.cumsum(-1) - marks if by_end else marks
    expected = torch.stack([segment_rows(labels[b].tolist(), ages[b].tolist(), contexts) for b in range(3)])

    def rows_of(cuts, empty_rows=0):
        past, rows, first = None, [], 0
        for size in cuts:
            piece = slice(first, first + size)
            if empty_rows and past is None:
                past = torch.zeros(3, empty_rows, 2, dtype=torch.long)  # a static cache before it is filled
            new = number_segments(marks[:, piece], ages[:, piece], past, by_end=by_end)
            distances = segment_distances(new, ages[:, piece], contexts, past)
            index = torch.arange(first, first + size)[:, None]
            rows.append(torch.where(distances > 0, index - distances, -1))
            past = new if past is None else torch.cat([past, new], 1)
            first += size
        return torch.cat(rows, 1)

    assert torch.equal(rows_of([length]), expected)
    for cuts in ([10, 13], [1] * length, [5, 1, 1, 9, 7]):
        assert torch.equal(rows_of(cuts), expected), cuts
        assert torch.equal(rows_of(cuts, empty_rows=6), expected), cuts
