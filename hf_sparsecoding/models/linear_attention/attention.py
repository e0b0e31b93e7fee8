"""Self-attention with constants: linear with a matrix beside every projection, and softmax with one beside the scores.

B batch, H heads, m tokens, n columns. The projections are n x n, and the heads' outputs are summed.
"""

import torch
from torch import Tensor, nn


ROLES = ("query", "key", "value")


class SummedHeads(nn.Module):
    """`H W` per head for queries, keys and values, and what becomes of them in a subclass.

    Args:
        hidden_size: Columns n.
        sequence_length: Tokens m of a prompt.
        num_heads: Heads whose outputs are summed.
        bias: Learn constants, which fix the prompt's length; without them any length is accepted.
    """

    def __init__(self, hidden_size: int, sequence_length: int, num_heads: int = 1, bias: bool = True):
        super().__init__()
        self.hidden_size, self.sequence_length, self.num_heads = hidden_size, sequence_length, num_heads
        self.has_bias = bias
        for role in ROLES:
            weight = torch.empty(num_heads, hidden_size, hidden_size)
            self.register_parameter(f"{role}_weight", nn.Parameter(weight))

    def project(self, hidden_states: Tensor, role: str) -> Tensor:
        return hidden_states.unsqueeze(-3) @ getattr(self, f"{role}_weight")  # [B, H, m, n]

    def check(self, hidden_states: Tensor) -> None:
        tokens, columns = hidden_states.shape[-2:]
        if columns != self.hidden_size:
            raise ValueError(f"prompts must have {self.hidden_size} columns (hidden_size), got {columns}")
        if self.has_bias and tokens != self.sequence_length:
            raise ValueError(
                f"prompts must have {self.sequence_length} tokens (sequence_length), got {tokens}: the constants hold "
                "a row per token; append rows of zeros or build the module for this length"
            )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, sequence_length={self.sequence_length}, num_heads={self.num_heads}, "
            f"bias={self.has_bias}"
        )


class ExtendedLinearAttention(SummedHeads):
    """`sum_h (H W3 + B3)(H W1 + B1)^T (H W2 + B2)` for H [B, m, n], without a softmax. Source: arXiv 2503.23814.

    The paper's W3, W1, W2 are `query_weight`, `key_weight`, `value_weight` [H, n, n]; its B3, B1, B2 are the biases
    [H, m, n] of the same names. `bias=False` is plain linear self-attention.
    """

    def __init__(self, hidden_size: int, sequence_length: int, num_heads: int = 1, bias: bool = True):
        super().__init__(hidden_size, sequence_length, num_heads, bias)
        for role in ROLES if bias else ():
            constant = torch.empty(num_heads, sequence_length, hidden_size)
            self.register_parameter(f"{role}_bias", nn.Parameter(constant))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values for which inputs of size one give outputs of size one; a bias has half of the variance."""
        m, n = self.sequence_length, self.hidden_size
        # of a projection: an output's variance is its cube, times m n for keys and values as if they were independent,
        # and m^2 as both come from the same tokens
        variance = (self.num_heads * m * (m + n)) ** (-1 / 3)
        variance = variance / 2 if self.has_bias else variance
        for role in ROLES:
            nn.init.normal_(getattr(self, f"{role}_weight"), std=(variance / n) ** 0.5)
            if self.has_bias:
                nn.init.normal_(getattr(self, f"{role}_bias"), std=variance**0.5)

    def project(self, hidden_states: Tensor, role: str) -> Tensor:
        projected = super().project(hidden_states, role)
        return projected + getattr(self, f"{role}_bias") if self.has_bias else projected

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.check(hidden_states)
        query, key, value = (self.project(hidden_states, role) for role in ROLES)
        if hidden_states.shape[-2] > self.hidden_size:  # the cheaper order: there is no softmax in between
            return (query @ (key.mT @ value)).sum(-3)
        return (query @ key.mT @ value).sum(-3)


class ScoreBiasAttention(SummedHeads):
    """`sum_h softmax((H W_q)(H W_k)^T + B) (H W_v)` for H [B, m, n], with `score_bias` B [H, m, m].

    Not the same as extended linear attention, whose constants stand beside the projections. The scores are not divided
    by sqrt(n). `bias=False` is softmax attention.
    """

    def __init__(self, hidden_size: int, sequence_length: int, num_heads: int = 1, bias: bool = True):
        super().__init__(hidden_size, sequence_length, num_heads, bias)
        if bias:
            self.score_bias = nn.Parameter(torch.empty(num_heads, sequence_length, sequence_length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values for which inputs of size one give scores and outputs of size one; a bias of zero."""
        nn.init.normal_(self.query_weight, std=self.hidden_size**-0.75)
        nn.init.normal_(self.key_weight, std=self.hidden_size**-0.75)
        nn.init.normal_(self.value_weight, std=(self.num_heads * self.hidden_size) ** -0.5)
        if self.has_bias:
            nn.init.zeros_(self.score_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.check(hidden_states)
        query, key, value = (self.project(hidden_states, role) for role in ROLES)
        scores = query @ key.mT  # [B, H, m, m]
        scores = scores + self.score_bias if self.has_bias else scores
        return (scores.softmax(-1) @ value).sum(-3)
