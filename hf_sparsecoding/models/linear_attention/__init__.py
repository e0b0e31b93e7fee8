"""Extended linear self-attention (arXiv 2503.23814) and its baselines: modules, constructions, one small model."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from .attention import ExtendedLinearAttention, ScoreBiasAttention
from .configuration_linear_attention import LinearAttentionConfig
from .modeling_linear_attention import LinearAttentionForRegression, LinearAttentionModel


AutoConfig.register("linear_attention", LinearAttentionConfig, exist_ok=True)
AutoModel.register(LinearAttentionConfig, LinearAttentionModel, exist_ok=True)
# regression is sequence classification with one label, as in transformers
AutoModelForSequenceClassification.register(LinearAttentionConfig, LinearAttentionForRegression, exist_ok=True)

__all__ = [
    "ExtendedLinearAttention",
    "LinearAttentionConfig",
    "LinearAttentionForRegression",
    "LinearAttentionModel",
    "ScoreBiasAttention",
]
