"""Attention functions with thresholded coefficients, for transformers' AttentionInterface.

An adapted attention module passes `sparsecoding_threshold=(kind, xi)` down to the attention function in its keyword
arguments. Without it (other layers, disabled adapters) the function is the one that the model had before.

B batch, H heads, G key-value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.attention import allowed_keys, decode, eager_coefficients, sparse_attention
from .contexts import allowed_by


THRESHOLD_KEY = "sparsecoding_threshold"

# the implementation that the model was loaded with -> ours on top of it. The names must not contain "sdpa" or "flash":
# transformers takes such names for its own.
NAMES = {"sdpa": "sparse_coding", "eager": "sparse_coding_eager"}


def install(model: PreTrainedModel) -> None:
    """Let the model's attention go through the functions of this module; installing twice changes nothing.

    Coefficients are returned by a model loaded with attn_implementation="eager", for `output_attentions=True` given to
    the forward or to `generate` (transformers refuses it in the config, where it looks for the name "eager").

    Raises:
        ValueError: if the model uses an implementation whose scores cannot be seen (flash, flex).
    """
    current = model.config._attn_implementation
    if current in NAMES.values():
        return
    if current not in NAMES:
        raise ValueError(
            f"thresholded coefficients need the attention scores, which attn_implementation={current!r} does not "
            'show; load the model with attn_implementation="sdpa" or "eager"'
        )
    model.set_attn_implementation(NAMES[current])


def uninstall(model: PreTrainedModel) -> None:
    """Give the model back the implementation it had before `install`."""
    for original, name in NAMES.items():
        if model.config._attn_implementation == name:
            model.set_attn_implementation(original)


def check_installed(config) -> None:
    """Raise RuntimeError if another attention function took the place of ours: it would drop the threshold unseen."""
    if config._attn_implementation not in NAMES.values():
        raise RuntimeError(
            f"attn_implementation was set to {config._attn_implementation!r} after the adapter with thresholded "
            "coefficients was added, which would drop the threshold; call "
            f"model.set_attn_implementation({NAMES['sdpa']!r})"
        )


def thresholded_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, D]
    key: Tensor,  # [B, G, S, D]
    value: Tensor,  # [B, G, S, D]
    attention_mask: Tensor | None,
    kind: str,
    threshold: Tensor,  # [B or 1, H]
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool = True,
    explicit: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, H, D] and, if `explicit`, the coefficients [B, H, T, S] that others do not compute as a whole."""
    device = query.device.type
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        # as autocast does for other attention functions; rotary embeddings have left queries and keys in float32
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    dropout = dropout if module.training else 0.0
    length, causal = query.shape[2], False
    if attention_mask is None and length > 1 and is_causal:
        # transformers leaves the mask out where it is plainly causal; a static cache has further, empty keys behind
        key, value, causal = key[:, :, :length], value[:, :, :length], True
    mask = None if attention_mask is None else _boolean(attention_mask[..., : key.shape[2]], module)
    if not explicit:
        outputs = sparse_attention(
            query,
            key,
            value,
            coefficients=kind,
            threshold=threshold,
            scale=scaling,
            mask=mask,
            causal=causal,
            softcap=softcap,
            dropout=dropout,
        )
        return outputs.transpose(1, 2).contiguous(), None
    allowed = allowed_keys(length, key.shape[2], mask, causal, device=query.device)
    alpha = eager_coefficients(query, key, kind, threshold, scaling, allowed, softcap).to(query.dtype)
    outputs = decode(nn.functional.dropout(alpha, p=dropout), value)
    return outputs.transpose(1, 2).contiguous(), alpha


def _boolean(mask: Tensor, module: nn.Module) -> Tensor:
    allowed = allowed_by(mask)
    if mask.dtype != torch.bool:
        plain = ((mask == 0) | ~allowed).all()
        message = (
            f"{type(module).__name__} was given an attention mask with biases, which thresholded coefficients do not "
            'know; use coefficients="base", or a mask of 0 and -inf'
        )
        if torch.compiler.is_compiling():
            torch._assert_async(plain, message)
        elif not plain:
            raise ValueError(message)
    return allowed


def _sparse_coding(original: str):
    def attention(module, query, key, value, attention_mask, **kwargs):
        thresholded = kwargs.pop(THRESHOLD_KEY, None)
        if thresholded is None:
            return _function(original, module)(module, query, key, value, attention_mask, **kwargs)
        for name in ("s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(module).__name__} passes {name} to its attention function, which thresholded coefficients "
                    'do not know; use coefficients="base"'
                )
        kind, threshold = thresholded
        scaling, is_causal = kwargs.get("scaling"), kwargs.get("is_causal")
        return thresholded_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            kind,
            threshold,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            dropout=kwargs.get("dropout", 0.0),
            softcap=kwargs.get("softcap"),
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
            explicit=original == "eager",
        )

    return attention


def _function(original: str, module: nn.Module):
    if original == "eager":  # not in the interface: each modeling file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[original]


for _original, _name in NAMES.items():
    AttentionInterface.register(_name, _sparse_coding(_original))
    # without a mask function of its own an attention function gets no mask at all: padding and causality vanish
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_original])
