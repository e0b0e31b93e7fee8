"""A causal decoder with softmax, sparse or top-k coefficients, any kind of positions, and a head that predicts them.

B batch, T new tokens, S tokens with those in the cache, H heads, D head dim, F hidden size, V tokens of the
vocabulary, P position ids.
"""

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from ...ops import coefficients, rms_over_keys, rms_per_head, sparse_attention
from ...ops.coefficients import inverse_softplus
from ...ops.precision import wide_dtype
from .configuration_sparse_decoder import SparseDecoderConfig
from .positions import alibi_slopes, relative_buckets, rotate


IGNORED = -100


class Layout(NamedTuple):
    """Where the new tokens stand among all: the same for every layer. Fused attention needs none of the matrices.

    places: Index of the new tokens, [T].
    kept: Keys that are not padding, bool [B, 1, 1, S]; None: all.
    distances: From each new token back to each key, [T, S].
    allowed: Keys that a new token may use, bool [T, S] or [B, 1, T, S].
    counts: How many these are, [T, 1] or [B, 1, T, 1]; 1 for a padding token, which may use none.
    """

    places: Tensor
    kept: Tensor | None
    distances: Tensor | None = None
    allowed: Tensor | None = None
    counts: Tensor | None = None


class SparseDecoderAttention(nn.Module):
    """Causal attention; the coefficients are softmax, `prox_xi` of the scores, or softmax over the k largest."""

    def __init__(self, config: SparseDecoderConfig, layer_index: int):
        super().__init__()
        self.config, self.layer_index = config, layer_index
        size = config.num_attention_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        if config.positions == "relative":
            self.relative_bias = nn.Parameter(torch.zeros(config.num_attention_heads, config.relative_buckets))
        if config.train_threshold:
            self.raw_threshold = nn.Parameter(torch.zeros(config.num_attention_heads))

    def threshold(self) -> float | Tensor:
        """xi, a number or [H, 1, 1]; a learned one is kept above 0 by a softplus."""
        if not self.config.train_threshold:
            return self.config.threshold
        return functional.softplus(self.raw_threshold)[:, None, None]

    def forward(
        self, hidden_states: Tensor, layout: Layout, cache: DynamicCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, F] -> the same, and the coefficients [B, H, T, S]; None without `layout.allowed`."""
        config, (batch, tokens, _) = self.config, hidden_states.shape
        projected = self.qkv_proj(hidden_states).view(batch, tokens, 3, config.num_attention_heads, config.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        if config.positions == "rope":
            query = rotate(query, layout.places, config.rope_theta)
            key = rotate(key, layout.places, config.rope_theta)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
        if layout.allowed is None:
            alpha, xi = None, self.threshold()
            rule = {"coefficients": "soft_threshold", "threshold": xi.flatten() if config.train_threshold else xi}
            out = sparse_attention(query, key, value, **rule, mask=layout.kept, causal=True)
        else:
            alpha = self.coefficients((query * config.head_dim**-0.5) @ key.mT, layout)
            out = alpha @ value
        if config.output_norm == "head":
            out = rms_per_head(out)
        elif config.output_norm == "length":
            out = out * layout.counts.to(out.dtype).rsqrt()
        return self.o_proj(out.transpose(1, 2).flatten(2)), alpha

    def coefficients(self, scores: Tensor, layout: Layout) -> Tensor:
        """sigma(scores), [B, H, T, S] both, zero at keys that may not be used."""
        config, allowed = self.config, layout.allowed
        if config.positions == "relative":
            buckets = relative_buckets(layout.distances, config.relative_buckets, config.relative_distance)
            scores = scores + self.relative_bias[:, buckets]
        penalty = 0.0
        if config.positions == "alibi":
            slopes = alibi_slopes(config.num_attention_heads, scores.device).to(scores.dtype)
            penalty = slopes[:, None, None] * layout.distances.clamp(min=0)  # [H, T, S]
        if config.mixer == "softmax":
            return coefficients.softmax(scores - penalty, allowed)
        if config.mixer == "top_k":
            return coefficients.top_k(scores - penalty, config.kept_keys, allowed)
        # rounding a score to half precision would move it across xi
        wide = scores.to(wide_dtype(scores))
        if config.score_norm != "none":
            count = layout.counts if config.score_norm == "keys" else torch.ones_like(layout.counts)
            wide = rms_over_keys(wide.masked_fill(~allowed, 0), count=count)
        return coefficients.soft_threshold(wide, self.threshold() + penalty, allowed).to(scores.dtype)


class SparseDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and around a residual connection."""

    def __init__(self, config: SparseDecoderConfig, layer_index: int):
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = SparseDecoderAttention(config, layer_index)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, layout: Layout, cache: DynamicCache | None
    ) -> tuple[Tensor, Tensor | None]:
        mixed, alpha = self.attention(self.input_norm(hidden_states), layout, cache)
        hidden_states = hidden_states + mixed
        inner = functional.gelu(self.up_proj(self.mlp_norm(hidden_states)), approximate="tanh")
        return hidden_states + self.down_proj(inner), alpha


class SparseDecoderPreTrainedModel(PreTrainedModel):
    """What both variants share: the configuration class and the initialisation."""

    config_class = SparseDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False

    def __init__(self, config: SparseDecoderConfig):
        config.check()  # from_pretrained(..., mixer="softmax") sets fields of a finished configuration
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, SparseDecoderAttention):
            if hasattr(module, "relative_bias"):
                nn.init.zeros_(module.relative_bias)
            if hasattr(module, "raw_threshold"):
                nn.init.constant_(module.raw_threshold, inverse_softplus(module.config.threshold))


class SparseDecoderModel(SparseDecoderPreTrainedModel):
    """Tokens to hidden states [B, T, F]."""

    def __init__(self, config: SparseDecoderConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_position + 1, config.hidden_size)
        self.layers = nn.ModuleList(SparseDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple:
        """
        Args:
            input_ids: [B, T] tokens.
            position_ids: [B, T] ids from 0 to `max_position`, for learned positions only, which need them.
            attention_mask: [B, S], with those in the cache: 0 where a token is padding. None: no padding on the left.
            past_key_values: Keys and values of the tokens before. None, with `use_cache`: begin with an empty cache.
            output_attentions: Also return every layer's coefficients [B, H, T, S].
        """
        config = self.config
        hidden_states = self.embedding(input_ids)
        if config.positions == "learned":
            if position_ids is None or position_ids.shape != input_ids.shape:
                shape = None if position_ids is None else tuple(position_ids.shape)
                raise ValueError(
                    f"positions='learned' needs position_ids of shape {tuple(input_ids.shape)}, got {shape}"
                )
            hidden_states = hidden_states + self.position_embedding(position_ids)
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        config.check_fused_attention()  # it may have been set since
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        explicit = output_attentions or not config.fused_attention
        layout = self.layout(input_ids, attention_mask, past_key_values, explicit)
        attentions = []
        for layer in self.layers:
            hidden_states, alpha = layer(hidden_states, layout, past_key_values)
            attentions.append(alpha)
        output = BaseModelOutputWithPast(
            last_hidden_state=self.final_norm(hidden_states),
            past_key_values=past_key_values,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return_dict = config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def layout(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: DynamicCache | None, explicit: bool = True
    ) -> Layout:
        past = 0 if cache is None else cache.get_seq_length()
        total = past + input_ids.shape[1]
        keys = torch.arange(total, device=input_ids.device)
        places, kept = keys[past:], None
        if attention_mask is not None:
            if attention_mask.shape != (len(input_ids), total):
                raise ValueError(
                    f"attention_mask must be [{len(input_ids)}, {total}], with the {past} tokens in the cache, got "
                    f"{list(attention_mask.shape)}"
                )
            kept = attention_mask.bool()[:, None, None]
        if not explicit:
            return Layout(places, kept)
        distances = places[:, None] - keys  # [T, S]
        allowed = distances >= 0 if kept is None else (distances >= 0) & kept
        return Layout(places, kept, distances, allowed, allowed.sum(-1, keepdim=True).clamp(min=1))


@dataclass
class SparseDecoderOutput(ModelOutput):
    """loss (if labels are given), logits [B, T, V], position_logits [B, T, P] (if they are predicted)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    position_logits: Tensor | None = None
    past_key_values: DynamicCache | None = None
    attentions: tuple[Tensor, ...] | None = None


class Decoded(NamedTuple):
    """Greedy continuations: tokens [B, N] and the position ids that they were given [B, N]."""

    tokens: Tensor
    position_ids: Tensor


class SparseDecoderForCausalLM(SparseDecoderPreTrainedModel):
    """The decoder with a head for the next token and, with `predict_positions`, one for its position id."""

    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it by itself

    def __init__(self, config: SparseDecoderConfig):
        super().__init__(config)
        self.model = SparseDecoderModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.predict_positions:
            self.position_head = nn.Linear(config.hidden_size, config.max_position + 1, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head = value

    def generate(self, *args, **kwargs) -> NoReturn:
        """Raises NotImplementedError: `greedy` is what generates here, as it feeds position ids back too."""
        raise NotImplementedError("the sparse decoder generates with greedy(input_ids, position_ids)")

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SparseDecoderOutput | tuple:
        """As `SparseDecoderModel`; `labels` and `position_labels` [B, T] give a loss.

        They are the token *after* each one and its position id, as the tasks make them: nothing is shifted here. -100
        leaves a token out. The loss is the cross-entropy of the tokens, plus that of the position ids where they are
        predicted, plus the L1 penalty, all of them means over the tokens with a label.
        """
        penalised = labels is not None and self.config.l1_penalty > 0
        wants_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output = self.model(
            input_ids,
            position_ids,
            attention_mask,
            past_key_values,
            use_cache,
            output_attentions=wants_attentions or penalised,
            return_dict=True,
        )
        logits = self.head(output.last_hidden_state)
        position_logits = self.position_head(output.last_hidden_state) if self.config.predict_positions else None
        loss = None
        if labels is not None:
            loss = _cross_entropy(logits, labels)
            if self.config.predict_positions:
                if position_labels is None:
                    raise ValueError("predict_positions=True needs position_labels beside labels")
                loss = loss + _cross_entropy(position_logits, position_labels)
            if penalised:
                rows = torch.stack([alpha.abs().sum(-1).mean(1) for alpha in output.attentions]).mean(0)  # [B, T]
                loss = loss + self.config.l1_penalty * rows[labels != IGNORED].mean()
        attentions = output.attentions if wants_attentions else None
        result = SparseDecoderOutput(loss, logits, position_logits, output.past_key_values, attentions)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()

    @torch.no_grad()
    def greedy(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        max_new_tokens: int = 20,
        eos_token_id: int | None = None,
        given_position_ids: Tensor | None = None,
    ) -> Decoded:
        """The likeliest next token, again and again, with a cache; both heads' choices are fed back.

        Args:
            input_ids, position_ids: Prompts of one length, [B, T].
            max_new_tokens: N; fewer are made where every sequence has reached `eos_token_id`.
            given_position_ids: Position ids of the new tokens [B, N], known beforehand (an oracle). None: predicted
                where the model does that, else counted on from the last (`cyclic_positions` says how).
        """
        self.eval()
        cache, tokens, ids = DynamicCache(), [], []
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for step in range(max_new_tokens):
            output = self(input_ids, position_ids, past_key_values=cache, return_dict=True)
            input_ids = output.logits[:, -1:].argmax(-1)
            if position_ids is not None:
                position_ids = self._next_position_ids(output, position_ids, given_position_ids, step)
                ids.append(position_ids)
            tokens.append(input_ids)
            if eos_token_id is not None:
                done |= input_ids[:, 0] == eos_token_id
                if done.all():
                    break
        tokens = torch.cat(tokens, 1)
        return Decoded(tokens, torch.cat(ids, 1) if ids else torch.zeros_like(tokens))

    def _next_position_ids(self, output: SparseDecoderOutput, last: Tensor, given: Tensor | None, step: int) -> Tensor:
        if given is not None:
            return given[:, step : step + 1]
        if output.position_logits is not None:
            return output.position_logits[:, -1:].argmax(-1)
        if self.config.cyclic_positions:
            return last[:, -1:] % self.config.max_position + 1
        return (last[:, -1:] + 1).clamp(max=self.config.max_position)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels must have shape {tuple(logits.shape[:2])}, got {tuple(labels.shape)}")
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
