"""The layer's attention: scores, coefficients, their transfer, decoding, with exchangeable mixers.

B batch, N tokens, H heads, D head dim, C tokens per context, K contexts, F hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops import (
    absolute_transfer,
    aligned_decode,
    coefficients,
    hyla,
    normalised_soft_threshold,
    rms_over_heads,
    rms_over_keys,
    rms_per_head,
    sparse_attention,
    transferred_coefficients,
)
from .configuration_sparse_transformer import SparseTransformerConfig


SCORE_NORMS = {"none": lambda scores: scores, "heads": rms_over_heads, "keys": rms_over_keys}


class SparseTransformerAttention(nn.Module):
    """Coefficients from scores, their transfer to the target, decoding. Source: arXiv 2511.20194, sec. 3."""

    def __init__(self, config: SparseTransformerConfig):
        super().__init__()
        self.config = config
        heads, size = config.num_attention_heads, config.num_attention_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * size, bias=config.use_bias)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=config.use_bias)
        distances = {"none": 0, "past": config.sequence_length, "both": 2 * config.sequence_length - 1}
        if distances[config.position_bias]:
            self.position_bias = nn.Parameter(torch.zeros(heads, distances[config.position_bias]))
        if config.transfer != "none":
            rows = heads if config.transfer_per_head else 1
            self.transfer_weight = nn.Parameter(torch.full((rows, config.num_contexts), float(config.transfer_init)))
        if config.mixer == "sparse_coding" and config.threshold_type != "fixed":
            rows = heads if config.threshold_type == "head" else 1
            self.raw_threshold = nn.Parameter(torch.zeros(rows))

    def threshold(self) -> float | Tensor:
        """xi, a number or [h, 1, 1]; a learned one is kept above 0 by a softplus."""
        if self.config.threshold_type == "fixed":
            return self.config.threshold
        return functional.softplus(self.raw_threshold)[:, None, None]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled dot products with the position bias, [B, H, N, N], not yet normalised."""
        scores = (query * self.config.head_dim**-0.5) @ key.mT  # [B, H, N, N]
        return scores if self.config.position_bias == "none" else scores + self.bias()

    def bias(self) -> Tensor:
        """The position bias of every pair of query and key, [H, N, N].

        Windows of one line per head: an index per pair would be looked up again for every example once compiled.
        """
        tokens, bias = self.config.sequence_length, self.position_bias  # by the query's distance from the key
        if self.config.position_bias == "past":
            bias = torch.cat([bias[:, :1].expand(-1, tokens - 1), bias], 1)
        return bias.flip(1).unfold(1, tokens, 1).flip(1)

    def coefficients(self, scores: Tensor, threshold_scale: float) -> Tensor:
        """Normalisation, sigma and, at the stage "scores", transfer."""
        config = self.config
        if config.transfer_stage == "scores":
            scores = self.lift(SCORE_NORMS[config.score_norm](scores))
        elif config.mixer == "sparse_coding" and config.score_norm != "none":
            return normalised_soft_threshold(scores, threshold_scale * self.threshold(), config.score_norm)
        else:
            scores = SCORE_NORMS[config.score_norm](scores)
        if config.mixer == "softmax":
            return coefficients.softmax(scores)
        if config.mixer == "sparse_coding":
            return coefficients.soft_threshold(scores, threshold_scale * self.threshold())
        return scores

    def forward(
        self,
        hidden_states: Tensor,
        threshold_scale: float = 1.0,
        output: bool = False,
        last: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, N, F] -> the same of the `last` tokens (None: all), and, if asked for, the coefficients
        [B, H, N, N] after transfer."""
        config = self.config
        batch, tokens, _ = hidden_states.shape
        projected = self.qkv_proj(hidden_states).view(batch, tokens, 3, config.num_attention_heads, config.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        key = key.relu() if config.phi == "relu" else key
        value = value.relu() if config.psi == "relu" else value
        transferred = config.transfer != "none" and config.transfer_stage == "coefficients"
        if config.fused_attention and not output:
            lifted, xi = None, threshold_scale * self.threshold()
            xi = xi if config.threshold_type == "fixed" else xi.flatten()
            out = sparse_attention(query, key, value, coefficients="soft_threshold", threshold=xi)
            out = self.transfer(out) if transferred else out
        else:
            alpha = self.coefficients(self.scores(query, key), threshold_scale)
            lifted = self.lift(alpha) if transferred and (output or config.mixer == "hyla") else alpha
            if config.mixer == "hyla":
                out = hyla(lifted, value)
            else:
                out = self.decode(alpha, value) if transferred else alpha @ value
        out = out if last is None else out[:, :, -last:]
        if config.output_norm == "head":
            out = rms_per_head(out)
        elif config.output_norm == "length":
            out = out * tokens**-0.5
        return self.o_proj(out.transpose(1, 2).flatten(2)), lifted if output else None

    def decode(self, alpha: Tensor, value: Tensor) -> Tensor:
        """`alpha psi`, the target's part with what the contexts transfer."""
        if self.config.transfer == "aligned":
            return aligned_decode(alpha, value, self.transfer_weight, self.config.context_length)
        return self.transfer(alpha @ value)

    def transfer(self, out: Tensor) -> Tensor:
        """The paper's form, on outputs [B, H, N, D]: the contexts' coefficients decode the same values."""
        length = self.config.context_length
        received = absolute_transfer(out, self.transfer_weight, length)
        return torch.cat([out[:, :, :-length], out[:, :, -length:] + received], 2)

    def lift(self, alpha: Tensor) -> Tensor:
        """Coefficients (or scores) [B, H, N, N] after transfer."""
        if self.config.transfer == "none":
            return alpha
        length = self.config.context_length
        received = transferred_coefficients(alpha, self.transfer_weight, length, self.config.transfer == "aligned")
        return torch.cat([alpha[:, :, :-length], alpha[:, :, -length:] + received], 2)
