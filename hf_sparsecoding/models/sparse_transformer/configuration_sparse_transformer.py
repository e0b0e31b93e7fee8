"""Configuration of the Sparse Coding Transformer and its baselines."""

import math

from transformers import PreTrainedConfig


MIXERS = ("softmax", "sparse_coding", "hyla", "linear")
CHOICES = {
    "mixer": MIXERS,
    "transfer": ("none", "paper", "aligned"),
    "transfer_stage": ("coefficients", "scores"),
    "input_type": ("one_hot", "continuous", "patches"),
    "phi": ("linear", "relu"),
    "psi": ("linear", "relu"),
    "threshold_type": ("fixed", "layer", "head"),
    "score_norm": ("none", "heads", "keys"),
    "output_norm": ("none", "head", "length"),
    "norm": ("layer", "rms"),
    "position_bias": ("none", "past", "both"),
    "image_loss": ("mse", "log_mse"),
}


class SparseTransformerConfig(PreTrainedConfig):
    """A non-causal pre-norm transformer over K contexts and a target of `context_length` tokens each.

    The defaults are the reference architecture for S-RAVEN (arXiv 2406.05816), 402,824 parameters.

    Args:
        mixer: "softmax", "sparse_coding" (`prox_xi` of the scores), "hyla" or "linear" (the scores themselves).
        transfer: How the contexts' coefficients reach the target: "none", "paper" (the same keys) or "aligned" (keys
            moved by the distance from context to target); see `hf_sparsecoding.ops.contexts`.
        transfer_stage: What is transferred: the "coefficients", as in the paper, or the "scores" that they are formed
            from, `alpha_L = sigma(S_L + sum_i lambda_i S_i)`: a threshold then keeps what the contexts agree on.
        transfer_per_head: One lambda per context and head, instead of one per context.
        transfer_init: Initial lambda.
        threshold: Initial xi >= 0 of "sparse_coding", in units of the scores as normalised by `score_norm`.
        threshold_type: xi "fixed", or learned per "layer" or per "head".
        phi, psi: Basis functions: "relu" puts a ReLU on the keys (encoding) or values (decoding dictionary).
        score_norm: Divide the scores by their root mean square over "heads" (as HYLA does) or "keys", before the
            coefficients are formed; scores of zero stay zero, small ones do not stay small. None picks "heads" for
            hyla and "none" for the others.
        output_norm: "head" divides each head's output by its root mean square; "length" divides it by sqrt(N), as a
            sum over N keys with coefficients of size one grows with it.
        fused_attention: Leave the coefficients to `hf_sparsecoding.ops.sparse_attention`: on a CPU, and in half
            precision on a GPU, it never holds all of them (memory is linear in the tokens) and skips tiles that it has
            found empty in the backward pass. Only what it knows: `mixer="sparse_coding"`, `score_norm="none"`,
            `position_bias="none"`, transfer "none" or "paper" of the coefficients. `output_attentions` takes the
            explicit way.
        input_type: "one_hot": integers below `num_values`, -1 for a zero vector. "continuous": vectors of size
            `input_size`. "patches": images of `image_size` pixels a side, cut into squares of `patch_size`.
        sequence_length: Tokens N, a multiple of `context_length`.
        context_length: Tokens C of one context and of the target.
        target_length: Tokens at the end whose output is predicted, at most `context_length`.
        head_dim: Size of queries, keys and values per head.
        position_bias: Learned bias per head and distance: "past" counts the keys before the query (those after it
            share the bias of distance 0), "both" counts keys on either side, "none".
        norm: "layer" or "rms"; without `use_bias`, "layer" has no bias either.
        use_bias: Biases in all linear layers.
        image_loss: Of image regression: "mse", the mean squared error, or "log_mse", the mean over pictures of
            log(MSE + 1e-4): up to a factor the PSNR of pictures worse than 40 dB. It counts ratios of errors, so that
            pictures whose answer the model does not know leave the others to be drawn well.
    """

    model_type = "sparse_transformer"

    def __init__(
        self,
        mixer: str = "softmax",
        transfer: str = "none",
        transfer_stage: str = "coefficients",
        transfer_per_head: bool = False,
        transfer_init: float = 0.0,
        threshold: float = 0.3,
        threshold_type: str = "fixed",
        phi: str = "linear",
        psi: str = "linear",
        score_norm: str | None = None,
        output_norm: str = "none",
        fused_attention: bool = False,
        input_type: str = "one_hot",
        num_values: int = 8,
        input_size: int = 8,
        image_size: int = 16,
        patch_size: int = 4,
        sequence_length: int = 36,
        context_length: int = 12,
        target_length: int = 4,
        hidden_size: int = 128,
        intermediate_size: int = 256,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 16,
        head_dim: int = 4,
        position_bias: str = "past",
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        use_bias: bool = True,
        image_loss: str = "mse",
        **kwargs,
    ):
        self.mixer, self.transfer, self.transfer_stage = mixer, transfer, transfer_stage
        self.transfer_per_head, self.transfer_init = transfer_per_head, transfer_init
        self.threshold, self.threshold_type = threshold, threshold_type
        self.phi, self.psi = phi, psi
        self.score_norm = score_norm if score_norm is not None else "heads" if mixer == "hyla" else "none"
        self.output_norm, self.fused_attention = output_norm, fused_attention
        self.input_type, self.num_values, self.input_size = input_type, num_values, input_size
        self.image_size, self.patch_size = image_size, patch_size
        self.sequence_length, self.context_length, self.target_length = sequence_length, context_length, target_length
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads, self.head_dim = (
            num_hidden_layers,
            num_attention_heads,
            head_dim,
        )
        self.position_bias, self.norm, self.norm_epsilon, self.use_bias = position_bias, norm, norm_epsilon, use_bias
        self.image_loss = image_loss
        self.check()
        if input_type != "patches" and kwargs.setdefault("num_labels", num_values) != num_values:
            raise ValueError(f"num_labels is num_values, got {kwargs['num_labels']} and {num_values}; set num_values")
        super().__init__(**kwargs)

    def check(self) -> None:
        """
        Raises:
            ValueError: a field has a value that there is none of, or does not go with the others.
        """
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 <= self.threshold < math.inf:  # nan neither
            raise ValueError(f"threshold must be >= 0 and finite, got {self.threshold}")
        if not math.isfinite(self.transfer_init):
            raise ValueError(f"transfer_init must be finite, got {self.transfer_init}")
        if self.image_loss != "mse" and self.input_type != "patches":
            raise ValueError(f"image_loss={self.image_loss!r} needs input_type='patches', got {self.input_type!r}")
        for name in (
            "sequence_length",
            "num_values",
            "input_size",
            "image_size",
            "patch_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "context_length",
            "target_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.threshold_type != "fixed" and self.mixer != "sparse_coding":
            raise ValueError(f"threshold_type={self.threshold_type!r} needs mixer='sparse_coding', got {self.mixer!r}")
        if self.transfer_stage == "scores" and self.transfer == "none":
            raise ValueError("transfer_stage='scores' needs transfer='paper' or 'aligned', got 'none'")
        self.check_fused_attention()
        if self.threshold_type != "fixed" and self.threshold == 0:
            raise ValueError("a learned threshold must start above 0, got threshold=0")
        if self.sequence_length % self.context_length:
            raise ValueError(
                f"sequence_length must be a multiple of context_length, got {self.sequence_length} and "
                f"{self.context_length}"
            )
        if self.transfer != "none" and self.num_contexts < 1:
            raise ValueError(
                f"transfer={self.transfer!r} needs a context before the target: sequence_length "
                f"{self.sequence_length} holds one piece of context_length {self.context_length}"
            )
        if self.target_length > self.context_length:
            raise ValueError(
                f"target_length must be at most context_length ({self.context_length}), got {self.target_length}"
            )
        if self.input_type == "patches" and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {self.image_size} and {self.patch_size}"
            )

    def check_fused_attention(self) -> None:
        """
        Raises:
            ValueError: `fused_attention` is set together with something that the kernel does not know.
        """
        if self.fused_attention and (
            (self.mixer, self.score_norm, self.position_bias) != ("sparse_coding", "none", "none")
            or self.transfer == "aligned"
            or self.transfer_stage == "scores"
        ):
            raise ValueError(
                "fused_attention needs mixer='sparse_coding', score_norm='none', position_bias='none' and transfer "
                f"'none' or 'paper' of the coefficients, got {self.mixer!r}, {self.score_norm!r}, "
                f"{self.position_bias!r} and {self.transfer!r} of the {self.transfer_stage}"
            )

    @property
    def num_contexts(self) -> int:
        """K; the paper's L - 1."""
        return self.sequence_length // self.context_length - 1
