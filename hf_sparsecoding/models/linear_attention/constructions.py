"""Matrix formulas that one layer of extended linear self-attention computes exactly. Source: arXiv 2503.23814.

H is a prompt of m tokens and n columns. Each of the three factors of `(H W3 + B3)(H W1 + B1)^T (H W2 + B2)` is made
constant (W = 0), linear (B = 0) or both; E is the m x n identity, padded with zeros: E^T E = I for m >= n, E E^T = I
for m <= n.

    C              constant      E H^T H     gram              U H^T V             transposed
    H              skip          U V^T H     left_constant     H B^T H             middle_constant
    H A + C        affine        H H^T B     right_constant    H A (H B)^T H C     three_factors

Gradient descent of ridge regression, `w <- w - eta [X^T (X w - y) + lambda w]`, with N examples of d features, works
on prompts of n = 2d + 2 columns, which `hf_sparsecoding.tasks.ridge_regression.parameter_prompts` writes: N data rows
[X, y, 0, 0] and a parameter row [0, 0, w, -1]. Stacked modules are consecutive steps.

Modules have the dtype of the matrices they are given, or `dtype`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import ExtendedLinearAttention


def affine(weight: Float[Tensor, "n n"], constant: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`H A + C`, in the queries for m >= n and else in the values; the other two factors are E."""
    m, n = constant.shape
    identity = torch.eye(m, n)
    if m >= n:
        given = {"query_weight": weight, "query_bias": constant, "key_bias": identity, "value_bias": identity}
    else:
        given = {"query_bias": identity, "key_bias": identity, "value_weight": weight, "value_bias": constant}
    return one_head(m, n, constant.dtype, **given)


def constant(matrix: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`C`, whatever the prompt."""
    n = matrix.shape[1]
    return affine(torch.zeros(n, n), matrix)


def skip(m: int, n: int, dtype: torch.dtype = torch.float32) -> ExtendedLinearAttention:
    """`H`: the residual connection that this layer does not come with."""
    return affine(torch.eye(n), torch.zeros(m, n, dtype=dtype))


def gram(m: int, n: int, dtype: torch.dtype = torch.float32) -> ExtendedLinearAttention:
    """`E H^T H`: the Gram matrix in the first rows; for m < n, its first m rows."""
    return one_head(m, n, dtype, query_bias=torch.eye(m, n), key_weight=torch.eye(n), value_weight=torch.eye(n))


def gram_block(
    m: int, n: int, left: Sequence[int], right: Sequence[int], dtype: torch.dtype = torch.float32
) -> ExtendedLinearAttention:
    """`X^T Y` in the upper left corner, zeros elsewhere, for the columns `left` (X) and `right` (Y) of the prompt."""
    if len(left) > m:
        raise ValueError(f"X^T Y needs a token for each column of X, got {len(left)} columns and {m} tokens")
    first, second = (moved_columns(n, columns, range(len(columns))) for columns in (left, right))
    return one_head(m, n, dtype, query_bias=torch.eye(m, n), key_weight=first, value_weight=second)


def left_constant(left: Float[Tensor, "m n"], right: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`U V^T H`: fixed combinations of the tokens."""
    m, n = left.shape
    return one_head(m, n, left.dtype, query_bias=left, key_bias=right, value_weight=torch.eye(n))


def middle_constant(matrix: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`H B^T H`."""
    m, n = matrix.shape
    return one_head(m, n, matrix.dtype, query_weight=torch.eye(n), key_bias=matrix, value_weight=torch.eye(n))


def right_constant(matrix: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`H H^T B`."""
    m, n = matrix.shape
    return one_head(m, n, matrix.dtype, query_weight=torch.eye(n), key_weight=torch.eye(n), value_bias=matrix)


def transposed(left: Float[Tensor, "m n"], right: Float[Tensor, "m n"]) -> ExtendedLinearAttention:
    """`U H^T V`."""
    m, n = left.shape
    return one_head(m, n, left.dtype, query_bias=left, key_weight=torch.eye(n), value_bias=right)


def three_factors(
    m: int, first: Float[Tensor, "n n"], second: Float[Tensor, "n n"], third: Float[Tensor, "n n"]
) -> ExtendedLinearAttention:
    """`H A (H B)^T H C`."""
    return one_head(m, len(first), first.dtype, query_weight=first, key_weight=second, value_weight=third)


def sum_of_heads(*modules: ExtendedLinearAttention) -> ExtendedLinearAttention:
    """One module with the heads of all, so that it computes the sum of what they compute."""
    sizes = {(module.hidden_size, module.sequence_length, module.has_bias) for module in modules}
    if len(sizes) != 1:
        raise ValueError(f"modules must agree in (hidden_size, sequence_length, bias), got {sorted(sizes)}")
    n, m, bias = sizes.pop()
    result = ExtendedLinearAttention(n, m, sum(module.num_heads for module in modules), bias)
    result = result.to(modules[0].query_weight)  # its dtype and device
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.copy_(torch.cat([getattr(module, name) for module in modules]))
    return result


def linear_first_step(
    examples: int, features: int, step_size: float, dtype: torch.dtype = torch.float32
) -> ExtendedLinearAttention:
    """Plain linear attention (no constants) on prompts [[X, y], [x, 0]]: the last token's last column becomes
    `eta x^T X^T y`, which is what the first step of gradient descent from w = 0 predicts for x."""
    m, n = examples + 1, features + 1
    inputs = moved_columns(n, range(features), range(features))
    target = moved_columns(n, [features], [features])
    given = {"query_weight": inputs, "key_weight": inputs, "value_weight": step_size * target}
    return one_head(m, n, dtype, bias=False, **given)


def ridge_step(
    examples: int, features: int, step_size: float, penalty: float, dtype: torch.dtype = torch.float32
) -> ExtendedLinearAttention:
    """One step of gradient descent in one head. The prompt ends in n rows of zeros: m = N + 1 + n tokens.

    In these rows the keys are I and the values are the matrix that shrinks w: `H` times that matrix is added to the
    gradient's part. The other rows have no constants.
    """
    m, n = examples + 1 + 2 * features + 2, 2 * features + 2
    data, parameter = range(features + 1), range(features + 1, n)
    key_bias, value_bias = torch.zeros(2, m, n, dtype=torch.float64)
    key_bias[-n:], value_bias[-n:] = torch.eye(n), shrinkage(features, step_size, penalty)
    return one_head(
        m,
        n,
        dtype,
        query_weight=torch.eye(n),
        key_weight=moved_columns(n, data, parameter),  # H K^T is X w - y, in the parameter row alone
        key_bias=key_bias,
        value_weight=-step_size * moved_columns(n, data[:-1], parameter[:-1]),
        value_bias=value_bias,
    )


def ridge_step_two_heads(
    examples: int, features: int, step_size: float, penalty: float, dtype: torch.dtype = torch.float32
) -> ExtendedLinearAttention:
    """One step of gradient descent in two summed heads, for prompts of m = N + 1 tokens: the squares' gradient, and a
    skip connection that shrinks w."""
    m, n = examples + 1, 2 * features + 2
    data, parameter = range(features + 1), range(features + 1, n)
    gradient = one_head(
        m,
        n,
        dtype,
        query_weight=moved_columns(n, parameter, data),
        key_weight=moved_columns(n, data, data),
        value_weight=-step_size * moved_columns(n, data[:-1], parameter[:-1]),
    )
    return sum_of_heads(gradient, affine(shrinkage(features, step_size, penalty), torch.zeros(m, n, dtype=dtype)))


def shrinkage(features: int, step_size: float, penalty: float) -> Float[Tensor, "n n"]:
    """The identity with `1 - eta lambda` in the columns of w."""
    matrix = torch.eye(2 * features + 2, dtype=torch.float64)
    weights = range(features + 1, 2 * features + 1)
    matrix[weights, weights] = 1 - step_size * penalty
    return matrix


def moved_columns(n: int, sources: Sequence[int], places: Sequence[int]) -> Float[Tensor, "n n"]:
    """S for which column `places[i]` of `H S` is column `sources[i]` of H, and the others are zero."""
    selector = torch.zeros(n, n, dtype=torch.float64)
    selector[list(sources), list(places)] = 1
    return selector


def one_head(
    m: int, n: int, dtype: torch.dtype, bias: bool = True, **given: Float[Tensor, "..."]
) -> ExtendedLinearAttention:
    """A head with the given parameters ("key_weight", "value_bias", ...), zero for the others."""
    module = ExtendedLinearAttention(n, m, bias=bias).to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = given.get(name, torch.zeros(parameter.shape[1:]))
            if value.shape != parameter.shape[1:]:  # copy_ would broadcast it
                raise ValueError(f"{name} must have shape {tuple(parameter.shape[1:])}, got {tuple(value.shape)}")
            parameter.copy_(value)
    return module
