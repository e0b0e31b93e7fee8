"""A tiny Llama that reads single characters, as a folder; and processes forked from the test's own."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tiny_model


CHARACTERS = "0123456789 \nabcdefghijklmnopqrstuvwxyz"


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def save_character_model(folder: Path) -> str:
    character_tokenizer().save_pretrained(folder)
    tiny_model(seed=0).save_pretrained(folder)
    return str(folder)


def forked(work: Callable[[], None], environment: dict[str, str] | None = None) -> multiprocessing.Process:
    """A started process that runs `work` with a fresh Accelerate state; forked, so that it need not import again."""

    def run():
        os.environ.update(environment or {})
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def run_distributed(work: Callable[[], None], processes: int = 2) -> None:
    """Run `work` in processes that see what torch.distributed.run would tell them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": str(processes)}
    started = [forked(work, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)]
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0] * processes
