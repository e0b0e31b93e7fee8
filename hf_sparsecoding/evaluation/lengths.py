"""Accuracy of a decoder on problems of one length, longer ones than it was trained on among them.

B problems, T tokens, H heads, N tokens of the response.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from ..models import SparseDecoderForCausalLM
from ..ops.attention import explicit_sparsity
from ..tasks.length_generalization import EOS, PAD, SequenceTask


HELD_SHARE = 0.9  # of the weight of a row of coefficients


@torch.no_grad()
def evaluate_length(
    model: SparseDecoderForCausalLM,
    task: SequenceTask,
    length: int,
    accelerator: Accelerator,
    items: int,
    batch_size: int,
    seed: int,
    oracle: bool,
) -> dict[str, float]:
    """Metrics on `items` problems of one length, shared by the processes; responses are decoded greedily.

    Args:
        oracle: Give the true position ids of the response, as training does; else the model predicts or counts them.

    Returns:
        `exact_match`: share of responses with every token right, EOS included. `id_match` (if the model predicts
        positions): share with every position id right. `concentration`: number of keys that hold 90 % of a row's
        absolute coefficients, where the response is predicted. `zero_coefficients`, `zero_tiles` (of a mixer that
        makes zeros): shares of the coefficients and of tiles of 128 x 128 of them that causality allows, in all rows
        but padding.
    """
    model.eval()
    starts = range(0, items, batch_size)
    measured = []
    for start in list(starts)[accelerator.process_index :: accelerator.num_processes]:
        examples = task.examples_of_length(length, start, min(batch_size, items - start), "test", seed)
        batch = {name: torch.from_numpy(array).to(accelerator.device) for name, array in examples.items()}
        measured.append((start, _measure(model, batch, oracle)))
    # in the order of the problems: the same sum whatever the number of processes
    rows = [row for _, row in sorted(gather_object(measured), key=lambda entry: entry[0])]
    total = sum(row["items"] for row in rows)
    return {name: sum(row[name] for row in rows) / total for name in rows[0] if name != "items"}


def _measure(model: SparseDecoderForCausalLM, batch: dict[str, Tensor], oracle: bool) -> dict[str, float]:
    """Sums over the problems of a batch, whose prompts have one size."""
    tokens, ids, start = batch["inputs"], batch["position_ids"], int(batch["response_start"][0])
    learned, response = model.config.positions == "learned", tokens[:, start:]
    decoded = model.greedy(
        tokens[:, :start],
        ids[:, :start] if learned else None,
        max_new_tokens=response.shape[1],
        eos_token_id=EOS,
        given_position_ids=ids[:, start:] if oracle else None,
    )
    sums = {"items": len(tokens), "exact_match": _all_equal(decoded.tokens, response, response != PAD)}
    if model.config.predict_positions:
        sums["id_match"] = _all_equal(decoded.position_ids, ids[:, start:], response > EOS)
    output = model(tokens, ids if learned else None, output_attentions=True)
    predicting = batch["labels"] >= 0
    needed = torch.stack([keys_needed(alpha) for alpha in output.attentions]).mean((0, 2))  # [B, T]
    sums["concentration"] = ((needed * predicting).sum(1) / predicting.sum(1)).sum().item()
    if model.config.mixer != "softmax":
        sizes = (tokens != PAD).sum(1)
        zeros = [zero_shares(alpha, sizes) for alpha in output.attentions]
        for name, shares in zip(("zero_coefficients", "zero_tiles"), zip(*zeros, strict=True), strict=True):
            sums[name] = len(tokens) * sum(shares) / len(shares)
    return sums


def _all_equal(values: Int[Tensor, "B M"], expected: Int[Tensor, "B N"], counted: Tensor) -> int:
    """How many rows agree wherever they are counted; `values` may have stopped early."""
    values = torch.nn.functional.pad(values, (0, expected.shape[1] - values.shape[1]), value=PAD)
    return int(((values == expected) | ~counted).all(1).sum())


def keys_needed(alpha: Float[Tensor, "B H T S"], share: float = HELD_SHARE) -> Float[Tensor, "B H T"]:
    """Smallest number of keys whose absolute coefficients make up `share` of the row's sum; 0 for a row of zeros."""
    weights = alpha.abs().sort(-1, descending=True).values
    totals = weights.sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    return ((before < share * totals) & (totals > 0)).sum(-1).to(alpha.dtype)


def zero_shares(alpha: Float[Tensor, "B H T T"], sizes: Int[Tensor, " B"]) -> tuple[float, float]:
    """Shares of causal coefficients, and of tiles of them, that are zero among the first `sizes` tokens of a problem:
    means over problems and heads."""
    elements = tiles = 0.0
    for size, count in zip(*(values.tolist() for values in sizes.unique(return_counts=True)), strict=True):
        found = explicit_sparsity(alpha[sizes == size, :, :size, :size], causal=True)
        elements += count * found.elements.mean().item()
        tiles += count * found.tiles.mean().item()
    return elements / len(sizes), tiles / len(sizes)
