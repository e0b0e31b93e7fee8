"""How in-context classification is learned: a two-layer network, its induction head, a model of its loss landscape."""

from transformers import AutoConfig, AutoModelForSequenceClassification

from .configuration_induction import InductionConfig, MinimalInductionConfig
from .modeling_induction import InductionForSequenceClassification, MinimalInductionForSequenceClassification


AutoConfig.register("induction", InductionConfig, exist_ok=True)
AutoConfig.register("minimal_induction", MinimalInductionConfig, exist_ok=True)
AutoModelForSequenceClassification.register(InductionConfig, InductionForSequenceClassification, exist_ok=True)
AutoModelForSequenceClassification.register(
    MinimalInductionConfig, MinimalInductionForSequenceClassification, exist_ok=True
)

__all__ = [
    "InductionConfig",
    "InductionForSequenceClassification",
    "MinimalInductionConfig",
    "MinimalInductionForSequenceClassification",
]
