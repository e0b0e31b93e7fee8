"""The tuner layer: an attention module whose per-head outputs receive those of their contexts.

B batch, T new tokens, H heads, D head dim, K contexts.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..ops import context_sum, transfer_lags
from .attention_function import THRESHOLD_KEY, check_installed
from .cache import history_of
from .config import SparseCodingConfig
from .contexts import CONTEXTS_KEY, ContextHook, ContextSpec


OUTPUT_PROJECTIONS = ("o_proj", "dense", "out_proj")

# modules between the attention and its output projection: transfer would act on what they made of the outputs
GATES = ("gate_proj", "g_proj", "gate", "q_gate_proj")
NORMS = ("attn_sub_norm", "sub_norm", "o_norm", "groupnorm", "inner_attn_ln")

# floating-point types other than those for storage alone
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# standard deviation of the numbers with init_weights=False
NON_IDENTITY_STD = 0.5


class LearnedCoefficients(nn.Module):
    """A trainable tensor that is had by calling: accelerate's offloading brings weights in when a module is called."""

    def __init__(self, *shape: int, value: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value))

    def forward(self) -> Tensor:
        return self.weight.clone()  # FSDP, which shards every trainable leaf by itself, frees what the call borrowed


class LearnedThreshold(LearnedCoefficients):
    """xi, which must stay >= 0: clamped, with the gradient of the identity so that it can come back from below."""

    def forward(self) -> Tensor:
        return self.weight - self.weight.detach().clamp(max=0)


class SparseCodingAttention(nn.Module, BaseTunerLayer):
    """Wraps an attention module; the transfer acts in front of its output projection.

    Raises:
        ValueError: if the module is none that can be adapted, saying why.
    """

    adapter_layer_names = ("sparsecoding_lambda", "sparsecoding_target", "sparsecoding_threshold")
    other_param_names = ("context_specs", "thresholds")

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: SparseCodingConfig, context_hook: ContextHook
    ):
        super().__init__()
        self.num_heads = check_attention(base_layer)
        self.width = output_projection(base_layer).in_features
        self.base_layer = base_layer
        self.context_hook = context_hook
        self.sparsecoding_lambda = nn.ModuleDict()  # [H or 1, K]
        self.sparsecoding_target = nn.ModuleDict()  # [H or 1]
        self.sparsecoding_threshold = nn.ModuleDict()  # [H]
        self.context_specs: dict[str, ContextSpec] = {}
        self.thresholds: dict[str, tuple[str, float]] = {}  # coefficients other than "base": kind, initial xi
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self._projection_hook = self._projection_hook_id = None
        self._hook_projection()
        self.register_state_dict_post_hook(_warn_of_inner_tuners)
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: SparseCodingConfig) -> None:
        """Add an adapter's numbers; those of an earlier adapter of the same name go."""
        for attribute in self.adapter_layer_names + self.other_param_names:
            if adapter_name in getattr(self, attribute):
                del getattr(self, attribute)[adapter_name]
        heads = self.num_heads if config.per_head else 1
        std = 0.0 if config.init_weights else NON_IDENTITY_STD
        if config.num_contexts:
            self.sparsecoding_lambda[adapter_name] = _initial(LearnedCoefficients(heads, config.num_contexts), std)
        if config.target_coefficient:
            self.sparsecoding_target[adapter_name] = _initial(LearnedCoefficients(heads), std)
        if config.coefficients != "base":
            self.thresholds[adapter_name] = (config.coefficients, config.threshold)
            if config.train_threshold:
                threshold = LearnedThreshold(self.num_heads, value=config.threshold)
                self.sparsecoding_threshold[adapter_name] = threshold
        self.context_specs[adapter_name] = ContextSpec.from_config(config)
        self.context_hook.specs[adapter_name] = self.context_specs[adapter_name]
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.context_hook.specs.pop(adapter_name, None)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module):
        projection = output_projection(base_layer)
        device, dtype = super()._get_base_layer_device_and_dtype(projection)
        hook = getattr(projection, "_hf_hook", None)
        # so few and small numbers are not rounded to half precision, in which an optimizer's steps would vanish
        dtype = torch.float64 if dtype == torch.float64 else None
        # an offloaded weight lies on "meta"; the numbers belong where it is run
        return getattr(hook, "execution_device", None) or device, dtype

    def cast_to_base_layer(self, adapter_name: str) -> None:
        """Give the adapter's numbers the base layer's type where one can compute in it, instead of float32."""
        _, dtype = super()._get_base_layer_device_and_dtype(output_projection(self.base_layer))
        if dtype in COMPUTED:
            for attribute in self.adapter_layer_names:
                if adapter_name in getattr(self, attribute):
                    getattr(self, attribute)[adapter_name].to(dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Nothing: another PEFT method in the model is being merged. SparseCodingModel refuses its own merging."""

    def unmerge(self) -> None:
        """As `merge`."""

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> SparseCodingAttention:
        """Unload other PEFT methods from the attention module, where peft does not look for them; this one stays."""
        for parent in list(self.base_layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, BaseTunerLayer):
                    if merge:
                        child.merge(safe_merge=safe_merge, adapter_names=adapter_names)
                    setattr(parent, name, child.get_base_layer())
        return self

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return False

    def remove_hook(self) -> None:
        """Detach from the output projection; the base layer is then as it was."""
        if self._projection_hook is not None:
            self._projection_hook.remove()
            self._projection_hook = self._projection_hook_id = None

    def forward(self, *args: Any, **kwargs: Any):
        adapter_names = kwargs.pop("adapter_names", None)
        contexts = kwargs.pop(CONTEXTS_KEY, None)
        # of the input, not of the weights: offloaded ones lie on "meta"
        device = (args[0] if args else kwargs["hidden_states"]).device
        shares = {} if self.disable_adapters else self._row_shares(adapter_names, device)
        if not shares:
            return self.base_layer(*args, **kwargs)
        if contexts is None:
            raise RuntimeError(
                f"SparseCoding: {type(self.base_layer).__name__} was not told the contexts of its tokens. Either it "
                "was called without its decoder, or the decoder passes no keyword arguments on and cannot be adapted"
            )
        if kwargs.get("cache") is not None:
            raise RuntimeError("SparseCoding does not support paged caches (continuous batching); use generate()")
        threshold = self._threshold(shares, device)
        if threshold is not None:
            check_installed(self.base_layer.config)
            kwargs[THRESHOLD_KEY] = threshold
        projection = self._hook_projection()
        # by type: some families have another name for past_key_values
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        # on the projection and not here: a hook is shared by all replicas of a module (nn.DataParallel), a projection
        # belongs to one
        projection._sparsecoding_call = (self, shares, contexts, cache)
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            projection._sparsecoding_call = None

    def _hook_projection(self) -> nn.Module:
        """The output projection, with the hook on it."""
        projection = output_projection(self.base_layer)
        # another adapter may have wrapped, or merged and unwrapped, the projection. By id: dynamo knows no handles
        if self._projection_hook_id not in projection._forward_pre_hooks:
            self.remove_hook()
            self._projection_hook = projection.register_forward_pre_hook(_lift_inputs)
            self._projection_hook_id = self._projection_hook.id
        return projection

    def _row_shares(self, adapter_names: list[str] | None, device: torch.device) -> dict[str, Tensor | None]:
        """Adapters at work in this call, each with the rows of the batch [B] that it applies to (None: all)."""
        if adapter_names is None:
            return {name: None for name in self.active_adapters if name in self.context_specs}
        return {
            name: torch.tensor([row == name for row in adapter_names], device=device)
            for name in dict.fromkeys(adapter_names)
            if name in self.context_specs
        }

    def _threshold(self, shares: dict[str, Tensor | None], device: torch.device) -> tuple[str, Tensor] | None:
        names = [name for name in shares if name in self.thresholds]
        if not names:
            return None
        kinds = {self.thresholds[name][0] for name in names}
        everywhere = len(shares) == 1 and (shares[names[0]] is None or bool(shares[names[0]].all()))
        if len(kinds) > 1 or ("soft_threshold" in kinds and not everywhere):
            raise ValueError(
                f"adapters with coefficients {sorted(kinds)} cannot be mixed with others in one call "
                f"({', '.join(shares)}); use them one at a time"
            )
        if len(names) > 1 and any(shares[name] is None for name in names):
            raise ValueError(f"only one active adapter may threshold the coefficients, got {', '.join(names)}")
        total = 0
        for name in names:
            if name in self.sparsecoding_threshold:
                xi = self.sparsecoding_threshold[name]()[None]  # [1, H]
            else:
                xi = torch.full((1, self.num_heads), self.thresholds[name][1], device=device)
            total = total + (xi if shares[name] is None else xi * shares[name][:, None])
        return kinds.pop(), total

    def lift(self, flat: Tensor, shares: dict, contexts: dict[str, Any], cache: Cache | None) -> Tensor:
        """The per-head outputs, side by side in the last dimension [B, T, H * D], with those of their contexts."""
        if flat.shape[-1] != self.width:
            raise ValueError(
                f"SparseCoding: got {flat.shape[-1]} attention outputs, {self.num_heads} heads give {self.width}; "
                "tensor parallelism is not supported"
            )
        outputs = flat.view(*flat.shape[:-1], self.num_heads, -1)  # [B, T, H, D]
        return self._transfer(outputs, shares, contexts, cache).view(flat.shape)

    def _transfer(self, outputs: Tensor, shares: dict, contexts: dict[str, Any], cache: Cache | None) -> Tensor:
        specs = {name: self.context_specs[name] for name in shares}
        depths = [spec.depth for spec in specs.values()]
        depth = None if None in depths else max(depths)
        history = None
        if cache is not None and depth != 0:
            history = history_of(cache, self.base_layer.layer_idx, depth, outputs.shape[1])
        past = None if history is None else history.past()

        lags, weight = self._lag_weights(specs, shares)
        recent = past if past is None or not lags else past[:, -max(lags) :]
        lifted = transfer_lags(
            outputs, weight, lags, target=self._targets(shares), age=contexts["age"], history=recent if lags else None
        )
        for name, spec in specs.items():
            if spec.marks_key is not None:
                if history is not None:
                    history.check_segments(spec.marks_key)
                rows = self._segment_rows(contexts, spec, outputs.shape[1], past)
                weight = _for_rows(self.sparsecoding_lambda[name]()[None], shares[name])
                lifted = lifted + context_sum(outputs, weight, rows, history=past)
        if history is not None:
            history.append(outputs, contexts["segments"])
        return lifted

    def _targets(self, shares: dict) -> Tensor | None:
        """Sum of lambda_0 over the adapters at work, [B or 1, H or 1]."""
        terms = [
            _for_rows(self.sparsecoding_target[name]()[None], rows)
            for name, rows in shares.items()
            if name in self.sparsecoding_target
        ]
        return sum(terms[1:], terms[0]) if terms else None

    def _lag_weights(self, specs: dict[str, ContextSpec], shares: dict) -> tuple[tuple[int, ...], Tensor | None]:
        """The union of the adapters' lags and lambda for it, [B or 1, H or 1, K]."""
        names = [name for name, spec in specs.items() if spec.lags and spec.num_contexts]
        if not names:
            return (), None
        weights = [_for_rows(self.sparsecoding_lambda[name]()[None], shares[name]) for name in names]
        if len(names) == 1:
            return specs[names[0]].lags, weights[0]
        union = tuple(sorted({lag for name in names for lag in specs[name].lags}))
        total = 0
        for name, weight in zip(names, weights, strict=True):
            places = torch.tensor([union.index(lag) for lag in specs[name].lags], device=weight.device)
            spread = weight.new_zeros(*weight.shape[:-1], len(union))
            total = total + spread.index_copy(-1, places, weight)
        return union, total

    def _segment_rows(self, contexts: dict[str, Any], spec: ContextSpec, length: int, past: Tensor | None) -> Tensor:
        distances = contexts["distances"].get(spec.marks_key)
        if distances is None:
            raise ValueError(
                "SparseCoding: contexts='segments' found no segments: "
                + (
                    "pass segment_ids [batch, length] to the forward (Trainer drops such a column unless "
                    "remove_unused_columns=False), or set segment_token_ids in the config"
                    if spec.segment_token_ids is None
                    else "segment_token_ids need input_ids; with inputs_embeds use a config without them and pass "
                    "segment_ids"
                )
            )
        distances = distances[..., : spec.num_contexts]
        first = 0 if past is None else past.shape[1]
        index = torch.arange(first, first + length, device=distances.device)[:, None]
        return torch.where(distances > 0, index - distances, -1)

    def __getattr__(self, name: str) -> Any:
        # decoder layers read attributes of their attention module
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    def __repr__(self) -> str:
        return "sparsecoding." + super().__repr__()


def _lift_inputs(projection: nn.Module, args: tuple) -> tuple | None:
    """Forward pre-hook of the output projection, whose input is the attention's outputs."""
    call = getattr(projection, "_sparsecoding_call", None)
    if call is None:
        return None
    attention, *rest = call
    return (attention.lift(args[0], *rest), *args[1:])


def _warn_of_inner_tuners(wrapper: SparseCodingAttention, *_: Any) -> None:
    """Of a LoRA in the attention module, peft saves keys that name the wrapper, and drops them in a model without."""
    if any(isinstance(module, BaseTunerLayer) for module in wrapper.base_layer.modules()):
        warnings.warn(
            "the attention modules hold another PEFT method beside SparseCoding. What is saved of that one now loads "
            "only into a model that has both again; to load it by itself, save it after unload() of the SparseCoding "
            "model",
            stacklevel=2,
        )


def output_projection(attention: nn.Module) -> nn.Module | None:
    return next((getattr(attention, name) for name in OUTPUT_PROJECTIONS if hasattr(attention, name)), None)


def check_attention(module: nn.Module) -> int:
    """Number of heads of an attention module that can be adapted; ValueError, saying why, for any other module."""
    kind = type(module).__name__
    projection = output_projection(module)
    if projection is None:
        raise ValueError(
            f"target_modules must name attention modules such as 'self_attn', got a {kind} without an output "
            f"projection ({', '.join(OUTPUT_PROJECTIONS)})"
        )
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if heads is None or not hasattr(module, "layer_idx"):
        raise ValueError(
            f"{kind} cannot be adapted: it has no config.num_attention_heads and layer_idx. If it is not part of the "
            "language model, leave it out with exclude_modules, a regex such as '.*vision.*'"
        )
    if getattr(module, "is_kv_shared_layer", False):
        raise ValueError(
            f"{kind} {module.layer_idx} shares another layer's keys and values and cannot be adapted; leave it out "
            "with layers_to_transform or exclude_modules"
        )
    width = getattr(projection, "in_features", None)
    if width is None or width % heads:
        raise ValueError(f"{kind} cannot be adapted: its output projection takes {width} inputs for {heads} heads")
    gates = [name for name in GATES + NORMS if isinstance(getattr(module, name, None), nn.Module)]
    query = getattr(module, "q_proj", None)
    if query is not None and getattr(query, "out_features", 0) == 2 * width:
        gates.append("q_proj")  # twice as wide: half of it is a gate
    if gates:
        raise ValueError(
            f"{kind} cannot be adapted: it changes the attention outputs ({', '.join(gates)}) before the output "
            "projection, where coefficients can no longer be transferred"
        )
    return heads


def _initial(module: LearnedCoefficients, std: float) -> LearnedCoefficients:
    if std:
        nn.init.normal_(module.weight, std=std)
    return module


def _for_rows(value: Tensor, rows: Tensor | None) -> Tensor:
    """`value` [1, ...] for the rows of the batch where `rows` [B] is True, zero for the others; None: for all."""
    return value if rows is None else value * rows.view(-1, *[1] * (value.ndim - 1))
