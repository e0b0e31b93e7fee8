"""A small causal decoder whose coefficients and positions are exchangeable."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_sparse_decoder import SparseDecoderConfig
from .modeling_sparse_decoder import SparseDecoderForCausalLM, SparseDecoderModel


AutoConfig.register("sparse_decoder", SparseDecoderConfig, exist_ok=True)
AutoModel.register(SparseDecoderConfig, SparseDecoderModel, exist_ok=True)
AutoModelForCausalLM.register(SparseDecoderConfig, SparseDecoderForCausalLM, exist_ok=True)

__all__ = ["SparseDecoderConfig", "SparseDecoderForCausalLM", "SparseDecoderModel"]
