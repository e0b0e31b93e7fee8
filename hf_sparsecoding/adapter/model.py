"""The tuner: puts `SparseCodingAttention` around a model's attention modules, in peft's way."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import attention_function
from .config import SparseCodingConfig
from .contexts import ContextHook
from .layer import SparseCodingAttention, check_attention
from .registration import PREFIX


MERGE_REFUSED = (
    "a SparseCoding adapter cannot be merged: it moves attention outputs between tokens, which no change of a weight "
    "matrix can do. Keep the adapter, or call unload() to get the base model back."
)


class SparseCodingModel(BaseTuner):
    """Adds SPARSECODING adapters to a transformers decoder. Use it through `peft.get_peft_model`.

    Beside LoRA: add the LoRA first (`model.add_adapter`), then `get_peft_model`. peft does not look into a module that
    is adapted already: a LoRA that comes second finds no projections in the attention ("Target modules not found") or
    takes only its targets elsewhere. Before the LoRA is saved, call `unload()`: its keys would name this method's
    modules.

    Raises:
        ValueError: if the model is a `PeftModel` already, or another method has an adapter of this name: saved, the
            two could not be told apart.
    """

    prefix = PREFIX
    tuner_layer_cls = SparseCodingAttention
    target_module_mapping: dict[str, list[str]] = {}

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any):
        if isinstance(model, PeftModel):
            raise ValueError(
                "the model is a PeftModel already: an adapter around it could not be loaded again. Adapt "
                'model.get_base_model() instead, which keeps the methods that are in it, with adapter_name="transfer" '
                "or another name that they do not have"
            )
        other = getattr(model, "peft_config", {}).get(adapter_name)
        if other is not None and not isinstance(other, SparseCodingConfig):
            raise ValueError(
                f"the model has an adapter {adapter_name!r} of another PEFT method ({other.peft_type.value}); "
                "give this one another adapter_name"
            )
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)

    def _prepare_adapter_config(self, peft_config: SparseCodingConfig, model_config: dict) -> PeftConfig:
        if model_config.get("is_encoder_decoder"):
            raise ValueError(
                f"SparseCoding adapts decoder-only models; {model_config.get('model_type')} is an encoder-decoder"
            )
        layers, indices = model_config.get("num_hidden_layers"), peft_config.layers_to_transform
        for index in [indices] if isinstance(indices, int) else indices or []:
            if layers is not None and not 0 <= index < layers:
                raise ValueError(
                    f"layers_to_transform has {index}, but the model's {layers} layers are 0 to {layers - 1}"
                )
        vocabulary = model_config.get("vocab_size")
        for token in peft_config.segment_token_ids or []:
            if vocabulary is not None and token >= vocabulary:
                raise ValueError(
                    f"segment_token_ids has {token}, which is not in the model's vocabulary of {vocabulary}"
                )
        if peft_config.target_modules is None:
            # every Llama-family decoder names it so; what cannot be adapted is refused module by module
            peft_config.target_modules = {"self_attn"}
        return peft_config

    def _create_and_replace(
        self,
        peft_config: SparseCodingConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        decoder = _decoder_of(self.model, current_key)
        if not isinstance(target, SparseCodingAttention):
            check_attention(target)
        # refusals come before anything is changed
        if peft_config.coefficients != "base":
            attention_function.install(decoder)
        if isinstance(target, SparseCodingAttention):
            target.update_layer(adapter_name, peft_config)
            return
        new_module = SparseCodingAttention(target, adapter_name, peft_config, _context_hook(decoder))
        if adapter_name not in self.active_adapters:
            new_module.requires_grad_(False)
        setattr(parent, target_name, new_module)

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        if not autocast_adapter_dtype:
            for module in self.modules():
                if isinstance(module, SparseCodingAttention):
                    module.cast_to_base_layer(adapter_name)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        if merge:
            self._check_merge_allowed()
        # peft's own would take the other methods in the model off too, but only those outside of the attention modules
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, SparseCodingAttention):
                    child.remove_hook()
                    setattr(parent, name, child.base_layer)
                elif isinstance(child, AuxiliaryTrainingWrapper):
                    self._unload_saved_module(parent, name, child)
            for key, hook in list(parent._forward_pre_hooks.items()):
                if isinstance(hook, ContextHook):
                    del parent._forward_pre_hooks[key]
                    parent._forward_pre_hooks_with_kwargs.pop(key, None)
                    attention_function.uninstall(parent)
        if hasattr(self.model, "peft_config"):
            others = {k: v for k, v in self.peft_config.items() if not isinstance(v, SparseCodingConfig)}
            if others:
                self.model.peft_config = others
            else:
                del self.model.peft_config
        return self.model

    def _unload_saved_module(self, parent: nn.Module, name: str, wrapper: AuxiliaryTrainingWrapper) -> None:
        """Take this method's copies out of a `modules_to_save` module; it stays if another method has copies too."""
        own = {key for key, config in self.peft_config.items() if isinstance(config, SparseCodingConfig)}
        others = set(wrapper._adapters) - own
        if not others:
            setattr(parent, name, wrapper.unload_and_optionally_merge_module(False, False, None))
            return
        for adapter in own & set(wrapper._adapters):
            wrapper.delete_adapter(adapter, sorted(others)[:1])

    def _check_merge_allowed(self) -> None:
        raise NotImplementedError(MERGE_REFUSED)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any):
        """Hand `adapter_names`, one per row of the batch, to the layers for the time of a forward or generate."""
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("adapter_names can only be passed in evaluation mode; call model.eval()")
        unknown = sorted(set(adapter_names) - set(self.peft_config) - {"__base__"})
        if unknown:
            raise ValueError(
                f"adapter_names has unknown adapters {', '.join(unknown)}; known are {', '.join(self.peft_config)} "
                "and __base__"
            )
        given = (*(kwargs.get(name) for name in ("input_ids", "inputs_embeds", "inputs")), *args[:1])
        inputs = next((value for value in given if value is not None), None)
        if inputs is not None and len(inputs) != len(adapter_names):
            raise ValueError(
                f"adapter_names must have one name per row: got {len(adapter_names)} for {len(inputs)} rows"
            )
        handles = [
            module.register_forward_pre_hook(
                partial(_pass_adapter_names, adapter_names=adapter_names), with_kwargs=True
            )
            for module in self.modules()
            if isinstance(module, SparseCodingAttention | AuxiliaryTrainingWrapper)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        own = model.state_dict()
        for key, saved in remapped.items():
            if PREFIX in key and key in own and own[key].shape != saved.shape:
                raise ValueError(
                    f"the adapter does not fit the model: {key} was saved with shape {list(saved.shape)}, the model "
                    f"has {list(own[key].shape)} (the first number is the attention heads). Load it on the model it "
                    "was trained on"
                )
        return remapped


def _pass_adapter_names(module: nn.Module, args: tuple, kwargs: dict, adapter_names: list[str]) -> tuple[tuple, dict]:
    batch = len(args[0] if args else kwargs["hidden_states"])
    copies, rest = divmod(batch, len(adapter_names))  # generation puts a row's beams side by side
    if rest or not copies:
        raise ValueError(f"{len(adapter_names)} adapter_names do not divide a batch of {batch} rows; give one per row")
    return args, {**kwargs, "adapter_names": [name for name in adapter_names for _ in range(copies)]}


def _decoder_of(model: nn.Module, key: str) -> PreTrainedModel:
    """The innermost transformers model around the module `key`: the one whose forward sees masks and positions."""
    parts = key.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, PreTrainedModel):
            if not module._supports_attention_backend:
                raise ValueError(
                    f"{type(module).__name__} cannot be adapted: it does not pass keyword arguments on to its "
                    "attention modules (transformers marks it as without attention backends)"
                )
            return module
    raise ValueError(f"SparseCoding adapts transformers models; {type(model).__name__} around {key} is none")


def _context_hook(decoder: PreTrainedModel) -> ContextHook:
    for hook in decoder._forward_pre_hooks.values():
        if isinstance(hook, ContextHook):
            return hook
    hook = ContextHook(decoder)
    decoder.register_forward_pre_hook(hook, with_kwargs=True)
    return hook
