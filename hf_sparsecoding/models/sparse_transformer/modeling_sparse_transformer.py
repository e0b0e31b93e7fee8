"""The Sparse Coding Transformer and its baselines: one layer with exchangeable mixers.

B batch, N tokens, H heads, D head dim, C tokens per context, K contexts, F hidden size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...ops import (
    absolute_transfer,
    aligned_decode,
    coefficients,
    hyla,
    normalised_soft_threshold,
    rms_over_heads,
    rms_over_keys,
    rms_per_head,
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

    def scores(self, query: Tensor, key: Tensor, distances: Tensor | None) -> Tensor:
        """Scaled dot products with the position bias, [B, H, N, N], not yet normalised."""
        scores = (query * self.config.head_dim**-0.5) @ key.mT  # [B, H, N, N]
        return scores if distances is None else scores + self.position_bias[:, distances]

    def coefficients(self, scores: Tensor, threshold_scale: float) -> Tensor:
        """Normalisation, sigma and, at the stage "scores", transfer."""
        config = self.config
        if config.transfer_stage == "scores":
            scores = self.lift(SCORE_NORMS[config.score_norm](scores))
        elif config.mixer == "sparse_coding" and config.score_norm == "heads":
            return normalised_soft_threshold(scores, threshold_scale * self.threshold())
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
        distances: Tensor | None,
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
        alpha = self.coefficients(self.scores(query, key, distances), threshold_scale)
        transferred = config.transfer != "none" and config.transfer_stage == "coefficients"
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
        length = self.config.context_length
        if self.config.transfer == "aligned":
            return aligned_decode(alpha, value, self.transfer_weight, length)
        out = alpha @ value
        received = absolute_transfer(out, self.transfer_weight, length)
        return torch.cat([out[:, :, :-length], out[:, :, -length:] + received], 2)

    def lift(self, alpha: Tensor) -> Tensor:
        """Coefficients (or scores) [B, H, N, N] after transfer."""
        if self.config.transfer == "none":
            return alpha
        length = self.config.context_length
        received = transferred_coefficients(alpha, self.transfer_weight, length, self.config.transfer == "aligned")
        return torch.cat([alpha[:, :, :-length], alpha[:, :, -length:] + received], 2)


class SparseTransformerLayer(nn.Module):
    """Attention and MLP, each after a norm and around a residual connection."""

    def __init__(self, config: SparseTransformerConfig):
        super().__init__()
        self.input_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = SparseTransformerAttention(config)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)

    def forward(self, hidden_states, distances, threshold_scale, output, last=None):
        mixed, alpha = self.attention(self.input_norm(hidden_states), distances, threshold_scale, output, last)
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
                nn.init.constant_(module.raw_threshold, math.log(math.expm1(config.threshold)))  # inverse softplus


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

    def distances(self, device: torch.device) -> Tensor | None:
        """Index of the position bias of each pair of query and key, [N, N]."""
        if self.config.position_bias == "none":
            return None
        place = torch.arange(self.config.sequence_length, device=device)
        distance = place[:, None] - place
        return distance.clamp(min=0) if self.config.position_bias == "past" else distance + len(place) - 1

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
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states = self.embedding(self.vectors(inputs))
        distances = self.distances(inputs.device)
        states, attentions = [hidden_states], []
        for layer in self.layers:
            kept = last if layer is self.layers[-1] else None
            hidden_states, alpha = layer(hidden_states, distances, threshold_scale, output_attentions, kept)
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
    """Draws the target's pictures: labels [B, images, image_size, image_size], mean squared error."""

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
        return functional.mse_loss(logits.float(), labels)


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
