"""The two-layer attention-only network in which induction heads form, and a minimal model of such a head.

B batch, N pairs, T = 2 N + 1 tokens (item, label, ..., item, label, target), F token size, D content size, R rows (the
last tokens, as queries). Source: arXiv 2312.03002.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from ...ops import coefficients, rms_over_keys, transferred_coefficients
from .configuration_induction import InductionConfig, MinimalInductionConfig


class InductionAttention(nn.Module):
    """`V sum_{j <= i} alpha_ij u_j` with `alpha_i = sigma(K u_j . Q u_i)`: no scale, no output matrix."""

    def __init__(self, config: InductionConfig):
        super().__init__()
        self.config = config
        self.query_proj = nn.Linear(config.token_size, config.head_dim, bias=False)
        self.key_proj = nn.Linear(config.token_size, config.head_dim, bias=False)
        self.value_proj = nn.Linear(config.token_size, config.token_size, bias=False)
        if config.transfer != "none":
            self.transfer_weight = nn.Parameter(torch.full((1, config.num_pairs), float(config.transfer_init)))

    def forward(self, tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """tokens [B, T, F] -> what the last `rows` of them receive [B, R, F], and their coefficients [B, 1, R, T]."""
        length = tokens.shape[1]
        queries = rows if self.config.transfer == "none" else length
        scores = self.query_proj(tokens[:, -queries:]) @ self.key_proj(tokens).mT
        mask = torch.ones(queries, length, dtype=torch.bool, device=tokens.device).tril(length - queries)
        seen = mask.sum(-1, keepdim=True, dtype=tokens.dtype)  # keys of each query, [queries, 1]
        alpha = self.lift(self.coefficients(scores[:, None], mask, seen))[:, :, -rows:]
        out = self.value_proj(alpha[:, 0] @ tokens)
        return out * seen[-rows:] ** -0.5 if self.config.output_norm == "length" else out, alpha

    def coefficients(self, scores: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        if self.config.score_norm == "keys":
            scores = rms_over_keys(scores.masked_fill(~mask, 0), count=seen)
        if self.config.mixer == "softmax":
            return coefficients.softmax(scores, mask)
        return coefficients.soft_threshold(scores, self.config.threshold, mask)

    def lift(self, alpha: Tensor) -> Tensor:
        """Coefficients [B, 1, T, T] after transfer to the target."""
        if self.config.transfer == "none":
            return alpha
        pairs = functional.pad(alpha, (0, 1, 0, 1))  # an empty token stands for the target's missing label
        received = transferred_coefficients(pairs, self.transfer_weight, 2, self.config.transfer == "aligned")
        return torch.cat([alpha[:, :, :-1], alpha[:, :, -1:] + received[:, :, :1, :-1]], 2)


class _Classifier(PreTrainedModel):
    """What both models share: a three-layer classifier, its loss, and the initialisation."""

    main_input_name = "inputs"
    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it by itself

    def __init__(self, config: InductionConfig | MinimalInductionConfig, features: int):
        config.check()  # from_pretrained(..., mixer="linear") sets fields of a finished configuration
        super().__init__(config)
        if config.num_outputs != config.num_labels:
            raise ValueError(
                f"num_outputs={config.num_outputs} and num_labels={config.num_labels} are the same number of labels; "
                "set both, or make a new config with num_outputs alone"
            )
        hidden = config.intermediate_size
        self.classifier = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, config.num_labels),
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Attention N(0, 1 / D), the classifier LeCun-normal with zero biases, lambda as configured."""
        if isinstance(module, nn.Linear):
            fan_in = self.config.content_size if module.bias is None else module.in_features
            nn.init.normal_(module.weight, std=fan_in**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "transfer_weight"):
            nn.init.constant_(module.transfer_weight, self.config.transfer_init)

    def classify(
        self,
        features: Tensor,
        labels: Tensor | None,
        attentions: tuple[Tensor, ...],
        output_attentions: bool | None,
        return_dict: bool | None,
    ) -> SequenceClassifierOutput | tuple:
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        logits = self.classifier(features)
        loss = None if labels is None else functional.cross_entropy(logits.float(), labels)
        output = SequenceClassifierOutput(loss, logits, attentions=attentions if output_attentions else None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


def _check_inputs(inputs: Tensor, size: str, fits: bool) -> None:
    if inputs.ndim != 3 or inputs.shape[1] % 2 == 0 or not fits:
        raise ValueError(f"inputs must be [batch, 2 pairs + 1 tokens, {size} numbers], got {tuple(inputs.shape)}")


class InductionForSequenceClassification(_Classifier):
    """`v = u + attention1(u)`, `w = v + attention2(v)`, a classifier on the target's w."""

    config_class = InductionConfig

    def __init__(self, config: InductionConfig):
        super().__init__(config, config.token_size)
        self.layers = nn.ModuleList(InductionAttention(config) for _ in range(2))
        self.post_init()

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """
        Args:
            inputs: Tokens [B, T, F]; with transfer N must be `num_pairs`.
            labels: Answers [B]; the loss is their mean cross-entropy.
            output_attentions: Also return the coefficients after transfer, all tokens' of the first layer
                [B, 1, T, T] and the target's of the second [B, 1, 1, T].
        """
        _check_inputs(inputs, f"{self.config.token_size}", inputs.shape[-1] == self.config.token_size)
        if self.config.transfer != "none" and inputs.shape[1] != 2 * self.config.num_pairs + 1:
            raise ValueError(f"transfer is between {self.config.num_pairs} pairs, got {inputs.shape[1] // 2}")
        tokens = inputs.to(self.layers[0].key_proj.weight.dtype)
        received, first = self.layers[0](tokens, tokens.shape[1])
        tokens = tokens + received
        received, second = self.layers[1](tokens, 1)
        target = tokens[:, -1] + received[:, 0]
        return self.classify(target, labels, (first, second), output_attentions, return_dict)


class MinimalInductionForSequenceClassification(_Classifier):
    """The induction head alone, on the tokens' content x:

    q1_ij ~ exp(beta1 [j = i - 1]), j <= i;      y_i = sum_j q1_ij x_j
    q2_j ~ exp(alpha y_j . x_T + beta2 [j is a label]);      w = sum_j q2_j x_j;      classifier on [w; x_T]
    """

    config_class = MinimalInductionConfig

    def __init__(self, config: MinimalInductionConfig):
        super().__init__(config, 2 * config.content_size)
        self.beta1, self.alpha = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        if config.label_bias:
            self.beta2 = nn.Parameter(torch.zeros(()))
        self.post_init()

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Arguments as those of `InductionForSequenceClassification`; attentions are q1 and q2."""
        size = self.config.content_size
        _check_inputs(inputs, f"at least {size}", inputs.shape[-1] >= size)
        content = inputs[..., -size:].to(self.classifier[0].weight.dtype)
        first = self.previous_token(content)  # [T, T]
        target = content[:, -1]
        scores = self.alpha * ((first @ content) @ target[..., None])[..., 0]  # [B, T]
        if self.config.label_bias:
            scores = scores + self.beta2 * (torch.arange(scores.shape[1], device=scores.device) % 2)
        second = scores.softmax(-1)
        found = (second[:, None] @ content)[:, 0]  # [B, D]
        attentions = (first.expand(len(inputs), 1, *first.shape), second[:, None, None])
        return self.classify(torch.cat([found, target], -1), labels, attentions, output_attentions, return_dict)

    def previous_token(self, content: Tensor) -> Tensor:
        """q1."""
        mask = content.new_ones(content.shape[1], content.shape[1], dtype=torch.bool).tril()
        before = mask.tril(-1) & ~mask.tril(-2)
        return coefficients.softmax(self.beta1 * before.to(content.dtype), mask)
