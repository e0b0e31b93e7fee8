"""The Sparse Coding Transformer and its baselines: one layer with exchangeable mixers.

B batch, N tokens, H heads, T target tokens, F hidden size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...ops.coefficients import inverse_softplus
from .attention import SparseTransformerAttention
from .configuration_sparse_transformer import SparseTransformerConfig


FORTY_DECIBELS = 1e-4  # mean squared error of pictures between 0 and 1


class SparseTransformerLayer(nn.Module):
    """Attention and MLP, each after a norm and around a residual connection."""

    def __init__(self, config: SparseTransformerConfig):
        super().__init__()
        self.input_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = SparseTransformerAttention(config)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    def forward(self, hidden_states, threshold_scale, output, last=None):
        mixed, alpha = self.attention(self.input_norm(hidden_states), threshold_scale, output, last)
        hidden_states = (hidden_states if last is None else hidden_states[:, -last:]) + mixed
        inner = functional.gelu(self.up_proj(self.mlp_norm(hidden_states)), approximate="tanh")
        return hidden_states + self.down_proj(inner), alpha


def make_norm(config: SparseTransformerConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, bias=config.use_bias)


class SparseTransformerPreTrainedModel(PreTrainedModel):
    """What all variants share: the configuration class and the initialisation."""

    config_class = SparseTransformerConfig
    base_model_prefix = "model"
    main_input_name = "inputs"
    supports_gradient_checkpointing = False

    def __init__(self, config: SparseTransformerConfig):
        config.check()  # from_pretrained(..., mixer="hyla") sets fields of a finished configuration
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """LeCun-normal matrices, zero biases (the reference's), lambda and xi as configured."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, SparseTransformerAttention):
            config = module.config
            if config.position_bias != "none":
                nn.init.normal_(module.position_bias, std=module.position_bias.shape[1] ** -0.5)
            if config.transfer != "none":
                nn.init.constant_(module.transfer_weight, config.transfer_init)
            if hasattr(module, "raw_threshold"):
                nn.init.constant_(module.raw_threshold, inverse_softplus(config.threshold))


class SparseTransformerModel(SparseTransformerPreTrainedModel):
    """Tokens to hidden states [B, N, F]."""

    def __init__(self, config: SparseTransformerConfig):
        super().__init__(config)
        sizes = {
            "one_hot": config.num_values,
            "continuous": config.input_size,
            "patches": config.patch_size**2,
        }
        self.embedding = nn.Linear(sizes[config.input_type], config.hidden_size, bias=config.use_bias)
        self.layers = nn.ModuleList(SparseTransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = make_norm(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def vectors(self, inputs: Tensor) -> Tensor:
        """Inputs as vectors [B, N, size]: one-hot, as they are, or patch by patch."""
        config = self.config
        if config.input_type == "one_hot":
            if inputs.is_floating_point():
                raise ValueError(
                    f"one-hot inputs are whole numbers, got {inputs.dtype}; vectors need input_type='continuous'"
                )
            _check_one_hot(inputs, config.num_values)
            # a table with a row of zeros for -1; no branch on data, which compiled and sharded models cannot take
            table = functional.pad(torch.eye(config.num_values, device=inputs.device), (0, 0, 1, 0))
            vectors = functional.embedding(inputs.long() + 1, table)
        elif config.input_type == "patches":
            if inputs.shape[-1] != config.image_size:
                raise ValueError(f"pictures must have sides of {config.image_size}, got {tuple(inputs.shape)}")
            vectors = to_patches(inputs, config.patch_size)
        else:
            vectors = inputs
        if vectors.ndim != 3 or vectors.shape[1] != config.sequence_length:
            raise ValueError(
                f"inputs of shape {tuple(inputs.shape)} are not batches of sequence_length={config.sequence_length} "
                "tokens"
            )
        return vectors.to(self.embedding.weight.dtype)

    def forward(
        self,
        inputs: Tensor,
        threshold_scale: float = 1.0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        last: int | None = None,
    ) -> BaseModelOutput | tuple:
        """
        Args:
            inputs: [B, N] integers, [B, N, input_size] vectors, or [B, images, image_size, image_size] pictures,
                according to `input_type`.
            threshold_scale: Factor on the threshold, for schedules.
            output_attentions: Also return every layer's coefficients [B, H, N, N], after transfer.
            output_hidden_states: Also return the embeddings and every layer's output, the last one normalised.
            last: Compute the last hidden state of this many tokens at the end only. None: of all.
        """
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        self.config.check_fused_attention()  # it may have been set since
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states = self.embedding(self.vectors(inputs))
        states, attentions = [hidden_states], []
        for layer in self.layers:
            kept = last if layer is self.layers[-1] else None
            hidden_states, alpha = layer(hidden_states, threshold_scale, output_attentions, kept)
            states.append(hidden_states)
            attentions.append(alpha)
        states[-1] = self.final_norm(hidden_states)
        output = BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if wants_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


def _check_one_hot(inputs: Tensor, count: int) -> None:
    """A readable error on a CPU; on an accelerator the look-up itself fails, without a wait for the device here."""
    if torch.compiler.is_compiling() or inputs.device.type != "cpu" or not inputs.numel():
        return
    low, high = (int(value) for value in torch.aminmax(inputs))
    if low < -1 or high >= count:
        raise ValueError(
            f"one-hot inputs must be between -1 (a zero vector) and {count - 1}, got values from {low} to {high}"
        )


@dataclass
class SparseTransformerOutput(ModelOutput):
    """loss (if labels are given), logits of the target tokens [B, T, num_values] or images [B, images, size, size]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class _WithHead(SparseTransformerPreTrainedModel):
    """The model with a linear head on the target's tokens; a subclass says how that is read and scored."""

    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it by itself

    def __init__(self, config: SparseTransformerConfig, outputs: int):
        super().__init__(config)
        self.model = SparseTransformerModel(config)
        self.head = nn.Linear(config.hidden_size, outputs, bias=config.use_bias)
        self.post_init()

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        threshold_scale: float = 1.0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SparseTransformerOutput | tuple:
        """As `SparseTransformerModel`, with `labels` also the mean loss; the last hidden state is the target's."""
        output = self.model(
            inputs,
            threshold_scale,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            last=self.config.target_length,
        )
        logits = self.read(self.head(output.last_hidden_state))
        loss = None
        if labels is not None:
            if labels.shape != self.label_shape(logits):
                raise ValueError(f"labels must have shape {self.label_shape(logits)}, got {tuple(labels.shape)}")
            loss = self.loss(logits, labels)
        result = SparseTransformerOutput(loss, logits, output.hidden_states, output.attentions)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()


class SparseTransformerForTokenClassification(_WithHead):
    """Classifies the target tokens: labels [B, target_length], cross-entropy."""

    def __init__(self, config: SparseTransformerConfig):
        super().__init__(config, config.num_values)

    def read(self, logits: Tensor) -> Tensor:
        return logits

    def label_shape(self, logits: Tensor) -> tuple[int, ...]:
        return tuple(logits.shape[:2])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class SparseTransformerForImageRegression(_WithHead):
    """Draws the target's pictures: labels [B, images, image_size, image_size], loss as `image_loss` says."""

    def __init__(self, config: SparseTransformerConfig):
        if config.input_type != "patches":
            raise ValueError(f"image regression needs input_type='patches', got {config.input_type!r}")
        patches = (config.image_size // config.patch_size) ** 2
        if config.target_length % patches:
            raise ValueError(
                f"target_length must be a multiple of the {patches} patches of a picture, got {config.target_length}"
            )
        super().__init__(config, config.patch_size**2)

    def read(self, logits: Tensor) -> Tensor:
        return from_patches(logits, self.config.image_size)

    def label_shape(self, logits: Tensor) -> tuple[int, ...]:
        return tuple(logits.shape)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.image_loss == "mse":
            return functional.mse_loss(logits.float(), labels)
        errors = (logits.float() - labels).square().mean((2, 3))
        return (errors + FORTY_DECIBELS).log().mean()


def to_patches(images: Tensor, size: int) -> Tensor:
    """[B, I, S, S] pictures -> [B, I * (S / size)^2, size^2], patch rows first."""
    if images.ndim != 4 or images.shape[-1] != images.shape[-2] or images.shape[-1] % size:
        raise ValueError(f"pictures must be [B, I, S, S] with S a multiple of {size}, got {tuple(images.shape)}")
    side = images.shape[-1] // size
    return images.unflatten(3, (side, size)).unflatten(2, (side, size)).transpose(3, 4).flatten(4).flatten(1, 3)


def from_patches(patches: Tensor, image_size: int) -> Tensor:
    """The inverse of `to_patches`: [B, I * (S / size)^2, size^2] -> [B, I, S, S]."""
    size = math.isqrt(patches.shape[-1])
    side = image_size // size
    return patches.unflatten(-1, (size, size)).unflatten(1, (-1, side, side)).transpose(3, 4).flatten(2, 3).flatten(3)
