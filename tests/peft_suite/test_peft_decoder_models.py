"""peft's decoder tests, and the common tests that peft itself runs on its custom models only."""

import peft_tests.test_decoder_models as suite
import pytest
from peft_tests.testing_utils import set_init_weights_false


class TestDecoderModels(suite.TestDecoderModels):
    pass


def common_test(name: str):
    @pytest.mark.parametrize("model_id", suite.PEFT_DECODER_MODELS_TO_TEST)
    @pytest.mark.parametrize(("config_cls", "config_kwargs"), suite.ALL_CONFIGS)
    def test(self, model_id, config_cls, config_kwargs):
        getattr(self, f"_test_{name}")(model_id, config_cls, set_init_weights_false(config_cls, config_kwargs))

    return test


for name in (
    "delete_unknown_adapter_raises",
    "load_model_low_cpu_mem_usage",
    "load_multiple_adapters",
    "merge_layers_is_idempotent",
    "safe_merge",
    "save_pretrained_adapter_name_substring",
):
    setattr(TestDecoderModels, f"test_{name}", common_test(name))
