"""Configuration of stacked extended linear self-attention and its baselines."""

from transformers import PreTrainedConfig


KINDS = ("extended", "linear", "score_bias", "softmax")


class LinearAttentionConfig(PreTrainedConfig):
    """Attention layers alone, without embedding, norm or MLP, on prompts that are matrices of m tokens and n columns.

    Args:
        kind: "extended" (a constant matrix beside each of queries, keys and values; arXiv 2503.23814), "linear" (the
            same without constants), "score_bias" (softmax with a constant matrix beside the scores) or "softmax".
        hidden_size: Columns n of a prompt.
        sequence_length: Tokens m of a prompt.
        num_hidden_layers: Layers.
        num_attention_heads: Heads per layer, with n x n projections; their outputs are summed.
        residual: Add each layer's input to its output. An extended layer can build this connection in one head.
    """

    model_type = "linear_attention"

    def __init__(
        self,
        kind: str = "extended",
        hidden_size: int = 5,
        sequence_length: int = 17,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 1,
        residual: bool = False,
        **kwargs,
    ):
        self.kind, self.residual = kind, residual
        self.hidden_size, self.sequence_length = hidden_size, sequence_length
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.check()
        kwargs.setdefault("num_labels", 1)
        super().__init__(**kwargs)

    def check(self) -> None:
        """
        Raises:
            ValueError: a field has a value that there is none of, or does not go with the others.
        """
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("hidden_size", "sequence_length", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
