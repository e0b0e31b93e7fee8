"""The tuner: puts `SparseCodingAttention` around a model's attention modules, in peft's way."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import attention_function
from .config import SparseCodingConfig
from .contexts import ContextHook
from .layer import MERGE_REFUSED, SparseCodingAttention
from .registration import PREFIX


class SparseCodingModel(BaseTuner):
    """Adds SPARSECODING adapters to a transformers decoder. Use it through `peft.get_peft_model`."""

    prefix = PREFIX
    tuner_layer_cls = SparseCodingAttention
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(self, peft_config: SparseCodingConfig, model_config: dict) -> PeftConfig:
        if model_config.get("is_encoder_decoder"):
            raise ValueError(
                f"SparseCoding adapts decoder-only models; {model_config.get('model_type')} is an encoder-decoder"
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
        if isinstance(target, SparseCodingAttention):
            target.update_layer(adapter_name, peft_config)
        else:
            decoder = _decoder_of(self.model, current_key)
            new_module = SparseCodingAttention(target, adapter_name, peft_config, _context_hook(decoder))
            if adapter_name not in self.active_adapters:
                new_module.requires_grad_(False)
            self._replace_module(parent, target_name, new_module, target)
        if peft_config.coefficients != "base":
            attention_function.install(_decoder_of(self.model, current_key))

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # peft's own moves `.weight` and `.bias`, which an attention module does not have
        if isinstance(child, SparseCodingAttention):
            child.remove_hook()
        setattr(parent, child_name, new_module)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        for module in self.model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, ContextHook):
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    attention_function.uninstall(module)
        return model

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
                f"adapter_names has unknown adapters {', '.join(unknown)}; known are {', '.join(self.peft_config)} and __base__"
            )
        inputs = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        if inputs is not None and len(inputs) != len(adapter_names):
            raise ValueError(
                f"adapter_names must have one name per row: got {len(adapter_names)} for {len(inputs)} rows"
            )
        beams = kwargs.get("num_beams") or 1
        names = [name for name in adapter_names for _ in range(beams)]
        handles = [
            module.register_forward_pre_hook(partial(_pass_adapter_names, adapter_names=names), with_kwargs=True)
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
                    f"the adapter does not fit the model: {key} was saved with shape {list(saved.shape)}, the model has "
                    f"{list(own[key].shape)} (the first number is the attention heads). Load it on the model it was trained on"
                )
        return remapped


def _pass_adapter_names(module: nn.Module, args: tuple, kwargs: dict, adapter_names: list[str]) -> tuple[tuple, dict]:
    return args, {**kwargs, "adapter_names": adapter_names}


def _decoder_of(model: nn.Module, key: str) -> PreTrainedModel:
    """The innermost transformers model around the module `key`: the one whose forward sees masks and positions."""
    parts = key.split(".")
    for end in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        if isinstance(module, PreTrainedModel):
            if not module._supports_attention_backend:
                raise ValueError(
                    f"{type(module).__name__} cannot be adapted: it does not pass keyword arguments on to its attention "
                    "modules (transformers marks it as without attention backends)"
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
