"""Stacked extended linear self-attention and its baselines. B batch, m tokens, n columns."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...ops.precision import wide_dtype
from .attention import ExtendedLinearAttention, ScoreBiasAttention, SummedHeads
from .configuration_linear_attention import LinearAttentionConfig


def make_attention(config: LinearAttentionConfig) -> SummedHeads:
    attention = ExtendedLinearAttention if config.kind in ("extended", "linear") else ScoreBiasAttention
    bias = config.kind in ("extended", "score_bias")
    return attention(config.hidden_size, config.sequence_length, config.num_attention_heads, bias)


class LinearAttentionPreTrainedModel(PreTrainedModel):
    """What both models share: the configuration class and the initialisation."""

    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    main_input_name = "inputs"
    supports_gradient_checkpointing = False

    def __init__(self, config: LinearAttentionConfig):
        config.check()  # from_pretrained(..., kind="linear") sets fields of a finished configuration
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SummedHeads):
            module.reset_parameters()


class LinearAttentionModel(LinearAttentionPreTrainedModel):
    """Prompts [B, m, n] to matrices [B, m, n]."""

    def __init__(self, config: LinearAttentionConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(make_attention(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(
        self, inputs: Tensor, output_hidden_states: bool | None = None, return_dict: bool | None = None
    ) -> BaseModelOutput | tuple:
        """`output_hidden_states` also returns the prompts and every layer's output."""
        expected = (self.config.sequence_length, self.config.hidden_size)
        if inputs.ndim != 3 or inputs.shape[1:] != expected:
            raise ValueError(f"inputs must be prompts [B, {expected[0]}, {expected[1]}], got {tuple(inputs.shape)}")
        states = [inputs.to(self.dtype)]
        for layer in self.layers:
            mixed = layer(states[-1])
            states.append(states[-1] + mixed if self.config.residual else mixed)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(states[-1], tuple(states) if wants_states else None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


@dataclass
class LinearAttentionOutput(ModelOutput):
    """loss (if labels are given), predictions [B, 1]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class LinearAttentionForRegression(LinearAttentionPreTrainedModel):
    """Reads the prediction where a prompt [[X, y], [x, 0]] leaves it open: in the last column of the last token.

    There are no parameters beside the layers'. labels [B], mean squared error.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it by itself

    def __init__(self, config: LinearAttentionConfig):
        super().__init__(config)
        self.model = LinearAttentionModel(config)
        self.post_init()

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LinearAttentionOutput | tuple:
        """As `LinearAttentionModel`; with `labels` also the loss."""
        output = self.model(inputs, output_hidden_states, return_dict=True)
        logits = output.last_hidden_state[:, -1, -1:]
        loss = None
        if labels is not None:
            if labels.shape != inputs.shape[:1]:
                raise ValueError(f"labels must have shape {tuple(inputs.shape[:1])}, got {tuple(labels.shape)}")
            wide = wide_dtype(logits)
            loss = functional.mse_loss(logits[:, 0].to(wide), labels.to(wide))
        result = LinearAttentionOutput(loss, logits, output.hidden_states)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()
