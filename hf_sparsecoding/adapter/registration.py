"""Makes SPARSECODING known to peft, from outside.

peft's `register_peft_method` accepts only members of its own closed enum, so the three mappings that it fills are
filled here. peft looks a method up by the string in `adapter_config.json`: a str-Enum whose member's name equals its
value is found by that string and by the member alike.
"""

from enum import Enum

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.peft_types import PeftType


class SparseCodingPeftType(str, Enum):
    SPARSECODING = "SPARSECODING"


# peft's own member, if one day there is one
PEFT_TYPE = getattr(PeftType, "SPARSECODING", SparseCodingPeftType.SPARSECODING)

# transformers derives the prefix from the lower-cased type
PREFIX = "sparsecoding_"


def register(config_class: type[PeftConfig], tuner_class: type[BaseTuner]) -> None:
    """Enter the method into peft's mappings. Registering the same classes again changes nothing.

    Raises:
        KeyError: if other classes already hold the name.
    """
    entries = (
        (PEFT_TYPE_TO_CONFIG_MAPPING, config_class),
        (PEFT_TYPE_TO_TUNER_MAPPING, tuner_class),
        (PEFT_TYPE_TO_PREFIX_MAPPING, PREFIX),
    )
    for mapping, value in entries:
        held = mapping.get(PEFT_TYPE, value)
        if _name(held) != _name(value):
            raise KeyError(f"peft already knows {PEFT_TYPE.value} as {held!r}; cannot register {value!r}")
    for mapping, value in entries:
        mapping[PEFT_TYPE] = value


def _name(value) -> str:
    # by name, so that a module reloaded in a notebook may register its new classes
    return getattr(value, "__qualname__", value)
