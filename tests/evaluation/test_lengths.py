import pytest
import torch
from accelerate import Accelerator

from hf_sparsecoding.evaluation.lengths import evaluate_length, keys_needed, zero_shares
from hf_sparsecoding.models import SparseDecoderConfig, SparseDecoderForCausalLM
from hf_sparsecoding.tasks.length_generalization import BOS, EOS, Addition, ScratchpadParity


TASK = Addition(train_lengths=(1, 3), test_lengths=(4,), max_position=10)


class Scripted(SparseDecoderForCausalLM):
    """Answers additions as a table says, without any attention: what the evaluation makes of answers is tested."""

    def __init__(self, answers: dict, ids: dict):
        config = SparseDecoderConfig(
            vocab_size=len(TASK.vocabulary),
            max_position=10,
            predict_positions=True,
            hidden_size=8,
            num_hidden_layers=1,
        )
        super().__init__(config)
        self.answers, self.ids = answers, ids

    def greedy(self, input_ids, position_ids, max_new_tokens, eos_token_id, given_position_ids):
        prompts = [tuple(row) for row in input_ids.tolist()]
        self.given = given_position_ids
        tokens = torch.tensor([self.answers[prompt] for prompt in prompts])
        return type("Decoded", (), {"tokens": tokens, "position_ids": torch.tensor([self.ids[p] for p in prompts])})


def evaluate(spoil=lambda number, tokens, ids: (tokens, ids), items=20, oracle=False, batch_size=8):
    rows = [
        TASK.examples_of_length(2, start, min(batch_size, items - start), "test", 0) for start in range(0, items, 8)
    ]
    answers, ids, number = {}, {}, 0
    for examples in rows:
        start = examples["response_start"][0]
        for tokens, places in zip(examples["inputs"].tolist(), examples["position_ids"].tolist(), strict=True):
            prompt = tuple(tokens[:start])
            answers[prompt], ids[prompt] = spoil(number, tokens[start:], places[start:])
            number += 1
    model = Scripted(answers, ids)
    return model, evaluate_length(model, TASK, 2, Accelerator(), items, batch_size, seed=0, oracle=oracle)


def test_right_answers():
    model, metrics = evaluate()
    assert (metrics["exact_match"], metrics["id_match"]) == (1, 1)
    assert model.given is None


def test_every_token_counts_and_the_end_too():
    def spoil(number, tokens, ids):
        if number < 5:  # a wrong digit
            return [tokens[0] ^ 1, *tokens[1:]], ids
        if number < 8:  # no end
            return [*tokens[:-1], BOS], ids
        return tokens, ids

    assert evaluate(spoil)[1]["exact_match"] == pytest.approx(12 / 20)


def test_position_ids_of_the_digits_count_but_not_that_of_the_end():
    def spoil(number, tokens, ids):
        return tokens, [*ids[:-1], 7] if number >= 5 else [ids[0] + 1, *ids[1:]]

    metrics = evaluate(spoil)[1]
    assert (metrics["exact_match"], metrics["id_match"]) == (1, pytest.approx(15 / 20))


def test_answers_that_stop_early_are_wrong():
    _, metrics = evaluate(lambda number, tokens, ids: ([EOS], [0]))
    assert (metrics["exact_match"], metrics["id_match"]) == (0, 0)


def test_an_oracle_gives_the_ids_of_the_response():
    model, _ = evaluate(oracle=True)
    last = TASK.examples_of_length(2, 16, 4, "test", 0)
    assert torch.equal(model.given, torch.from_numpy(last["position_ids"])[:, last["response_start"][0] :])


def test_keys_needed():
    alpha = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0], [0.5, -0.5, 0, 0], [0.85, 0.06, -0.05, 0.04], [1, 1, 1, 1]])
    assert keys_needed(alpha[None, None])[0, 0].tolist() == [0, 1, 2, 2, 4]


def test_concentration_is_where_the_response_is_predicted():
    model, metrics = evaluate()
    expected = []
    for start in range(0, 20, 8):
        examples = TASK.examples_of_length(2, start, min(8, 20 - start), "test", 0)
        tokens, ids = (torch.from_numpy(examples[name]) for name in ("inputs", "position_ids"))
        with torch.no_grad():
            (alpha,) = model(tokens, ids, output_attentions=True).attentions
        first = int(examples["response_start"][0])  # a token is predicted from the one before
        for row in alpha[:, :, first - 1 : tokens.shape[1] - 1]:
            sizes = row.abs().sort(-1, descending=True).values
            kept = (sizes.cumsum(-1) < 0.9 * sizes.sum(-1, keepdim=True)).sum(-1) + 1
            expected.append(kept.double().mean().item())
    assert metrics["concentration"] == pytest.approx(sum(expected) / len(expected))


def test_shares_of_zeros():
    alpha = torch.ones(2, 1, 200, 200).tril()
    sizes = torch.tensor([200, 200])
    assert zero_shares(alpha, sizes) == (0, 0)
    alpha[0, 0, 128:, :128] = 0  # one of three tiles, 72 x 128 of 20,100 coefficients, of one problem of two
    elements, tiles = zero_shares(alpha, sizes)
    assert tiles == pytest.approx(1 / 6)
    assert elements == pytest.approx(72 * 128 / 20100 / 2)


def test_padding_does_not_count():
    """Responses of one batch may have different lengths: metrics do not depend on which problems share one."""
    task = ScratchpadParity(train_lengths=(1, 4), test_lengths=(6,), max_position=30)
    torch.manual_seed(0)
    model = SparseDecoderForCausalLM(
        SparseDecoderConfig(vocab_size=len(task.vocabulary), max_position=30, mixer="sparse_coding")
    )
    each, all_ = (evaluate_length(model, task, 6, Accelerator(), 16, size, seed=0, oracle=True) for size in (1, 16))
    assert len(set((task.examples_of_length(6, 0, 16, "test", 0)["labels"] >= 0).sum(1))) > 1
    assert each == pytest.approx(all_)
    assert each["zero_coefficients"] > 0


@pytest.mark.parametrize("mixer", ["softmax", "sparse_coding", "top_k"])
def test_zeros_are_reported_where_there_are_any(mixer):
    torch.manual_seed(0)
    config = SparseDecoderConfig(vocab_size=len(TASK.vocabulary), max_position=10, mixer=mixer, kept_keys=2)
    metrics = evaluate_length(
        SparseDecoderForCausalLM(config), TASK, 3, Accelerator(), 20, batch_size=8, seed=0, oracle=True
    )
    assert ("zero_coefficients" in metrics) == (mixer != "softmax")
    if mixer != "softmax":
        assert 0 < metrics["zero_coefficients"] < 1 and metrics["zero_tiles"] == 0
