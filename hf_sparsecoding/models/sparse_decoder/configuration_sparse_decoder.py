"""Configuration of the causal decoder with exchangeable coefficients and positions."""

import math

from transformers import PreTrainedConfig


CHOICES = {
    "mixer": ("softmax", "sparse_coding", "top_k"),
    "score_norm": ("none", "keys", "row"),
    "output_norm": ("none", "length", "head"),
    "positions": ("none", "learned", "rope", "relative", "alibi"),
}


class SparseDecoderConfig(PreTrainedConfig):
    """A small causal pre-norm decoder (RMSNorm, GELU) for length generalisation.

    Args:
        vocab_size: Number of tokens.
        mixer: "softmax", "sparse_coding" (`prox_xi` of the scores) or "top_k" (softmax over the k largest scores).
        threshold: Initial xi >= 0 of "sparse_coding", in units of the scores as normalised by `score_norm`; below 1
            for `score_norm="row"`, whose scores are at most 1.
        train_threshold: One learned xi per head, instead of a fixed one.
        kept_keys: k of "top_k".
        score_norm: "keys" divides the scores of "sparse_coding" by their root mean square over the keys that the query
            may use, "row" by their Euclidean norm: what a key gets then does not depend on how many keys there are
            whose score is zero. "none" does not.
        output_norm: "length" divides a head's output by the square root of the number of keys that the query may use:
            under `score_norm="keys"` outputs grow with that. "head" divides it by its own root mean square. None picks
            "length" for "sparse_coding" with `score_norm="keys"` and "none" for the others.
        positions: "none"; "learned": a table of embeddings by position id, which may be absolute or coupled; "rope",
            "relative" (T5's learned bias per head and bucket of distances) and "alibi" count tokens and ignore the
            ids. Where softmax subtracts ALiBi's penalty from the scores, "sparse_coding" adds it to xi: a proximal
            operator is signed, and a large negative score is a large coefficient. With `score_norm="row"` a head whose
            slope is s therefore sees less than (1 - xi) / s tokens.
        max_position: Greatest position id of "learned" and of `predict_positions`.
        cyclic_positions: Where position ids are counted in decoding, 1 follows `max_position`; else it is repeated.
        predict_positions: A second head predicts the next token's position id (predictive position coupling).
        l1_penalty: Weight of `sum_j |alpha_tj|` in the loss, a mean over heads, layers and the tokens t with a label.
            It is constant where the coefficients come from a softmax.
        head_dim: Size of queries, keys and values per head. None: hidden_size / num_attention_heads.
        rope_theta: Base of the rotary frequencies.
        fused_attention: Leave the coefficients to `hf_sparsecoding.ops.sparse_attention`: on a CPU, and in half
            precision on a GPU, it never holds all of them (memory is linear in the tokens) and skips tiles that it has
            found empty in the backward pass. Only what it knows: `mixer="sparse_coding"`, `score_norm="none"`,
            `output_norm` "none" or "head", no "relative" or "alibi", no `l1_penalty`. `output_attentions` takes the
            explicit way.
        relative_buckets, relative_distance: Buckets of "relative", and the distance from which all share the last one.
        initializer_range: Standard deviation of the embeddings of tokens and positions at the start.
    """

    model_type = "sparse_decoder"

    def __init__(
        self,
        vocab_size: int = 16,
        mixer: str = "softmax",
        threshold: float = 1.0,
        train_threshold: bool = False,
        kept_keys: int = 4,
        score_norm: str = "keys",
        output_norm: str | None = None,
        fused_attention: bool = False,
        positions: str = "learned",
        max_position: int = 32,
        cyclic_positions: bool = False,
        predict_positions: bool = False,
        l1_penalty: float = 0.0,
        hidden_size: int = 128,
        intermediate_size: int = 256,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 4,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        relative_buckets: int = 32,
        relative_distance: int = 128,
        norm_epsilon: float = 1e-6,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        self.vocab_size, self.mixer = vocab_size, mixer
        self.threshold, self.train_threshold, self.kept_keys = threshold, train_threshold, kept_keys
        self.score_norm, self.fused_attention = score_norm, fused_attention
        grows = mixer == "sparse_coding" and score_norm == "keys"
        self.output_norm = output_norm if output_norm is not None else "length" if grows else "none"
        self.positions, self.max_position, self.cyclic_positions = positions, max_position, cyclic_positions
        self.predict_positions, self.l1_penalty = predict_positions, l1_penalty
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.head_dim = head_dim if head_dim is not None else hidden_size // max(1, num_attention_heads)
        self.rope_theta = rope_theta
        self.relative_buckets, self.relative_distance = relative_buckets, relative_distance
        self.norm_epsilon, self.initializer_range = norm_epsilon, initializer_range
        self.check()
        super().__init__(**kwargs)

    def check(self) -> None:
        """
        Raises:
            ValueError: a field has a value that there is none of, or does not go with the others.
        """
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "head_dim", "kept_keys", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("threshold", "l1_penalty", "initializer_range"):
            if not 0 <= getattr(self, name) < math.inf:  # nan neither
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.train_threshold and (self.mixer != "sparse_coding" or self.threshold == 0):
            raise ValueError(
                "train_threshold needs mixer='sparse_coding' and a threshold above 0 to start from, got "
                f"{self.mixer!r} and {self.threshold}"
            )
        if self.score_norm == "row" and self.mixer == "sparse_coding" and self.threshold >= 1:
            raise ValueError(f"score_norm='row' needs a threshold below 1, its largest score, got {self.threshold}")
        self.check_fused_attention()
        if self.predict_positions and self.positions != "learned":
            raise ValueError(f"predict_positions needs positions='learned', got {self.positions!r}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"positions='rope' needs an even head_dim, got {self.head_dim}")
        if self.relative_buckets < 2 or self.relative_distance <= self.relative_buckets // 2:
            raise ValueError(
                "relative_buckets must be at least 2 and relative_distance above half of them, got "
                f"{self.relative_buckets} and {self.relative_distance}"
            )

    def check_fused_attention(self) -> None:
        """
        Raises:
            ValueError: `fused_attention` is set together with something that the kernel does not know.
        """
        if self.fused_attention and (
            (self.mixer, self.score_norm) != ("sparse_coding", "none")
            or self.output_norm == "length"
            or self.positions in ("relative", "alibi")
            or self.l1_penalty
        ):
            raise ValueError(
                "fused_attention needs mixer='sparse_coding', score_norm='none', output_norm 'none' or 'head', "
                f"positions other than 'relative' and 'alibi', and no l1_penalty, got {self.mixer!r}, "
                f"{self.score_norm!r}, {self.output_norm!r}, {self.positions!r} and {self.l1_penalty}"
            )
