"""Configurations of the two-layer attention-only network and of the minimal model of its induction head."""

import math

from transformers import PreTrainedConfig


CHOICES = {
    "mixer": ("softmax", "sparse_coding"),
    "transfer": ("none", "paper", "aligned"),
    "score_norm": ("none", "keys"),
    "output_norm": ("none", "length"),
}


class _ClassifierConfig(PreTrainedConfig):
    """What both have: fields that are checked, and as many labels as outputs."""

    def __init__(self, **kwargs):
        self.check()
        kwargs.setdefault("num_labels", self.num_outputs)
        super().__init__(**kwargs)

    def check(self) -> None:
        """
        Raises:
            ValueError: a field has a value that there is none of, or does not go with the others.
        """
        raise NotImplementedError


class InductionConfig(_ClassifierConfig):
    """Two causal attention layers with one head each, and a classifier on the last token. Source: arXiv 2312.03002.

    The defaults are the published network. Tokens are `position_size` numbers for the position, then `content_size`
    numbers of content; a sequence is `num_pairs` pairs of an item and its label, and the target item.

    Args:
        mixer: "softmax", or "sparse_coding": `prox_xi` of the scores.
        transfer: How the coefficients of the contexts reach the target in each layer: "none", "paper" (the same keys)
            or "aligned" (keys moved by the distance from context to target); see `hf_sparsecoding.ops.contexts`.
            A context is a pair of an item and its label, and the target is a pair whose label is missing: so what the
            items of the contexts attend to reaches the target item, with one lambda per context.
        transfer_init: Initial lambda.
        threshold: xi >= 0 of "sparse_coding", in units of the scores as normalised by `score_norm`.
        score_norm: "keys" divides the scores of a query by their root mean square over the keys that it sees.
        output_norm: "length" divides the output of a query by the root of the number of keys that it sees.
        head_dim: Size of queries and keys; values are as wide as tokens.
        intermediate_size: Width of the classifier's two hidden layers.
        num_outputs: Labels L.
    """

    model_type = "induction"

    def __init__(
        self,
        mixer: str = "softmax",
        transfer: str = "none",
        transfer_init: float = 0.0,
        threshold: float = 0.3,
        score_norm: str = "none",
        output_norm: str = "none",
        position_size: int = 65,
        content_size: int = 63,
        num_pairs: int = 8,
        head_dim: int = 128,
        intermediate_size: int = 128,
        num_outputs: int = 32,
        **kwargs,
    ):
        self.mixer, self.transfer, self.transfer_init = mixer, transfer, transfer_init
        self.threshold, self.score_norm, self.output_norm = threshold, score_norm, output_norm
        self.position_size, self.content_size, self.num_pairs = position_size, content_size, num_pairs
        self.head_dim, self.intermediate_size, self.num_outputs = head_dim, intermediate_size, num_outputs
        super().__init__(**kwargs)

    def check(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 <= self.threshold < math.inf:  # nan neither
            raise ValueError(f"threshold must be >= 0 and finite, got {self.threshold}")
        _check_sizes(
            self, "position_size", "content_size", "num_pairs", "head_dim", "intermediate_size", "num_outputs"
        )

    @property
    def token_size(self) -> int:
        return self.position_size + self.content_size


class MinimalInductionConfig(_ClassifierConfig):
    """An induction head of two or three numbers, and a classifier. Source: arXiv 2312.03002.

    Args:
        content_size: The last so many numbers of a token; the model does not see those before, the position.
        label_bias: Also learn the third number, beta2, which draws the target's attention to labels.
        intermediate_size: Width of the classifier's two hidden layers.
        num_outputs: Labels L.
    """

    model_type = "minimal_induction"

    def __init__(
        self,
        content_size: int = 63,
        label_bias: bool = False,
        intermediate_size: int = 128,
        num_outputs: int = 32,
        **kwargs,
    ):
        self.content_size, self.label_bias = content_size, label_bias
        self.intermediate_size, self.num_outputs = intermediate_size, num_outputs
        super().__init__(**kwargs)

    def check(self) -> None:
        _check_sizes(self, "content_size", "intermediate_size", "num_outputs")


def _check_sizes(config: PreTrainedConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
