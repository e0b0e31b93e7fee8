"""Configuration of the SPARSECODING adapter."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from huggingface_hub import file_exists, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from .registration import PEFT_TYPE


PICKLE_REFUSED = (
    "{} is a pickle, which can run code when it is read: refused. Save the adapter again with safe_serialization=True "
    f"to get {SAFETENSORS_WEIGHTS_NAME}"
)

CONTEXTS = ("lags", "segments")
COEFFICIENTS = ("base", "thresholded_softmax", "soft_threshold")
SWITCHES = ("per_head", "target_coefficient", "train_threshold", "init_weights")


@dataclass
class SparseCodingConfig(PeftConfig):
    """
    Coefficient transfer between in-context examples, as a PEFT method.

    With O the per-head attention outputs before the output projection, the adapter computes
    `Z_t = (1 + lambda_0) O_t + sum_i lambda_i O_{context_i(t)}`, which is the transfer of sparse-coding coefficients
    `alpha_t <- (1 + lambda_0) alpha_t + sum_i lambda_i alpha_{context_i(t)}` (arXiv 2511.20194). lambda starts at 0: a
    fresh adapter is the base model.

    Args:
        num_contexts (`int`, *optional*): K, contexts per token (paper: L-1). Default 3, or the number of `lags` where
            those are given. 0 only with `target_coefficient`: the adapter then rescales heads and transfers nothing.
        contexts (`str`): which earlier tokens are the contexts of token t. "lags": token t - lags[i]. "segments": the
            text is cut after each of `segment_token_ids`; context i is the token at the same offset of the i-th
            segment before.
        lags (`list[int]`, *optional*): distances in tokens, distinct and >= 1; default 1..K. With contexts="lags".
        segment_token_ids (`list[int]`, *optional*): ids that end a segment, a newline for example. Only with
            contexts="segments"; without them every forward needs `segment_ids` [batch, length].
        per_head (`bool`): lambda per head and layer (H x K numbers per layer) or per layer (K; the paper's count).
        target_coefficient (`bool`): train lambda_0, the change of the target's own coefficients.
        coefficients (`str`): "base": the model's own softmax. "thresholded_softmax": prox_xi(softmax(S)).
            "soft_threshold": prox_xi(S), for models trained with it.
        threshold (`float`): initial xi >= 0, per head; below 1 with "thresholded_softmax".
        train_threshold (`bool`): train xi; needs coefficients other than "base".
        target_modules (`list[str] | str`, *optional*): names (or a regex) of the *attention modules* to adapt.
            Default: "self_attn", the name in the Llama family and its relatives.
        exclude_modules (`list[str] | str`, *optional*): names (or a regex) of modules to leave out.
        layers_to_transform (`list[int] | int`, *optional*): indices of the layers to adapt. Default: all.
        layers_pattern (`list[str] | str`, *optional*): name of the layer list, if it is not a common one.
        modules_to_save (`list[str]`, *optional*): further modules to train and save whole.
        init_weights (`bool`): True: lambda = 0, the identity. False: small random numbers, for tests.

    Raises:
        ValueError: for values out of range, unknown names, and fields that the others leave without use.
    """

    num_contexts: int | None = field(default=None)
    contexts: str = field(default="lags")
    lags: list[int] | None = field(default=None)
    segment_token_ids: list[int] | None = field(default=None)
    per_head: bool = field(default=True)
    target_coefficient: bool = field(default=False)
    coefficients: str = field(default="base")
    threshold: float = field(default=0.0)
    train_threshold: bool = field(default=False)
    target_modules: list[str] | str | None = field(default=None)
    exclude_modules: list[str] | str | None = field(default=None)
    layers_to_transform: list[int] | int | None = field(default=None)
    layers_pattern: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)
    init_weights: bool = field(default=True)

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        _check_choice("contexts", self.contexts, CONTEXTS)
        _check_choice("coefficients", self.coefficients, COEFFICIENTS)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} must be True or False (true or false in a file), got {getattr(self, name)!r}"
                )
        self._resolve_contexts()
        self._check_threshold()
        self._check_targets()

    def _resolve_contexts(self) -> None:
        if self.lags is not None:
            if self.contexts != "lags":
                raise ValueError(f"lags={self.lags} have no use with contexts={self.contexts!r}; drop one of them")
            self.lags = _check_ints("lags", self.lags, minimum=1)
            if len(set(self.lags)) < len(self.lags):
                raise ValueError(f"lags must be distinct, got {self.lags}")
            if self.num_contexts is None:
                self.num_contexts = len(self.lags)
            elif self.num_contexts != len(self.lags):
                raise ValueError(
                    f"num_contexts={self.num_contexts} does not match the {len(self.lags)} lags {self.lags}; "
                    "drop num_contexts"
                )
        if self.num_contexts is None:
            self.num_contexts = 3
        minimum = 0 if self.target_coefficient else 1
        cure = "" if self.target_coefficient else " (0 only with target_coefficient=True)"
        self.num_contexts = _check_int("num_contexts", self.num_contexts, minimum, cure)
        if self.contexts == "lags":
            self.lags = self.lags if self.lags is not None else list(range(1, self.num_contexts + 1))
        if self.segment_token_ids is not None:
            if self.contexts != "segments":
                raise ValueError(
                    f"segment_token_ids={self.segment_token_ids} have no use with contexts={self.contexts!r}; "
                    'set contexts="segments"'
                )
            if not self.segment_token_ids:
                raise ValueError("segment_token_ids must name at least one token id, got []")
            self.segment_token_ids = _check_ints("segment_token_ids", self.segment_token_ids, minimum=0)

    def _check_threshold(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, Real):  # Real: NumPy's numbers too
            raise ValueError(f"threshold must be a number, got {self.threshold!r}")
        self.threshold = float(self.threshold)
        if not 0 <= self.threshold < float("inf"):
            raise ValueError(f"threshold must be finite and >= 0, got {self.threshold}")
        if self.coefficients == "thresholded_softmax" and self.threshold >= 1:
            raise ValueError(
                f"threshold={self.threshold} leaves nothing of a softmax, whose coefficients are at most 1; "
                "begin far below, at 0.001 for example"
            )
        if self.coefficients == "base" and (self.threshold or self.train_threshold):
            given = f"threshold={self.threshold}" if self.threshold else "train_threshold=True"
            raise ValueError(
                f'{given} has no use with coefficients="base"; '
                'set coefficients="thresholded_softmax" or "soft_threshold"'
            )

    def _check_targets(self) -> None:
        if self.target_modules == "all-linear":
            raise ValueError(
                'target_modules="all-linear" is not possible: SparseCoding adapts attention modules such as '
                '"self_attn", not linear layers. Leave target_modules out to take "self_attn".'
            )
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                setattr(self, name, set(value))
        if isinstance(self.layers_to_transform, list | tuple):
            self.layers_to_transform = _check_ints("layers_to_transform", self.layers_to_transform, minimum=0)
        elif self.layers_to_transform is not None:
            self.layers_to_transform = _check_int("layers_to_transform", self.layers_to_transform, minimum=0)
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError(
                "layers_to_transform has no use when target_modules is a regex; select the layers in the regex"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("layers_pattern has no use without layers_to_transform; give both")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any):
        """Read `adapter_config.json`, and check that the weights beside it can be loaded.

        Raises:
            ValueError: if the weights are a pickle (`.bin`), truncated or corrupt.
        """
        folder = os.path.join(pretrained_model_name_or_path, subfolder or "")
        local = os.path.isdir(folder)
        if local:
            check_weights(folder)
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        if not local:
            check = check_cached_weights if HF_HUB_OFFLINE else check_hub_weights
            check(pretrained_model_name_or_path, subfolder, kwargs)
        return config


def check_weights(folder: str) -> None:
    """Raise ValueError if the adapter's weights in `folder` are a pickle, truncated or corrupt."""
    path = os.path.join(folder, SAFETENSORS_WEIGHTS_NAME)
    pickled = os.path.join(folder, WEIGHTS_NAME)
    if os.path.exists(path):
        try:
            with safe_open(path, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118 (not a dict)
                    weights.get_slice(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is truncated or corrupt ({error}); download or save the adapter again"
            ) from error
    elif os.path.exists(pickled):
        raise ValueError(PICKLE_REFUSED.format(pickled))


def check_hub_weights(repo_id: str, subfolder: str | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a Hub repository holds the adapter's weights as a pickle only."""
    found = {name: kwargs[name] for name in ("revision", "token") if kwargs.get(name) is not None}
    prefix = f"{subfolder}/" if subfolder else ""
    if file_exists(repo_id, prefix + SAFETENSORS_WEIGHTS_NAME, **found):
        return
    if file_exists(repo_id, prefix + WEIGHTS_NAME, **found):
        raise ValueError(PICKLE_REFUSED.format(f"{repo_id}/{prefix}{WEIGHTS_NAME}"))


def check_cached_weights(repo_id: str, subfolder: str | None, kwargs: dict[str, Any]) -> None:
    """As `check_weights`, for what the cache holds of a Hub repository."""
    found = {name: kwargs[name] for name in ("revision", "cache_dir") if kwargs.get(name) is not None}
    prefix = f"{subfolder}/" if subfolder else ""
    for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME):
        path = try_to_load_from_cache(repo_id, prefix + name, **found)
        if isinstance(path, str):
            check_weights(os.path.dirname(path))
            return


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_ints(name: str, values: Any, minimum: int) -> list[int]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} must be a list of whole numbers, got {values!r} ({type(values).__name__})")
    return [_check_int(name, value, minimum) for value in values]


def _check_int(name: str, value: Any, minimum: int, cure: str = "") -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # Integral: NumPy's integers too
    if not whole or value < minimum:
        raise ValueError(f"{name} must be >= {minimum} and whole{cure}, got {value!r}")
    return int(value)
