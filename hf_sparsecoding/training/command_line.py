"""Command lines of the scripts: dataclass arguments, a flat YAML file, flags that override it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from difflib import get_close_matches
from pathlib import Path

import yaml
from transformers import HfArgumentParser


def near_match(name: str, known: list[str]) -> str:
    """ "; did you mean X?" where a known name is close, and the list of names where none is."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


class Loader(yaml.SafeLoader):
    """YAML without two traps: `no` is a word (a precision, a tracker), and a key that occurs twice is an error."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or letter in "tTfF"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


class NumberLoader(Loader):
    """Without a third trap: 1e-3 is a number. On command lines it stays as it is written."""


EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")  # numbers that YAML 1.1 takes for text
NumberLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def read_mapping(path: str | Path, loader: type[Loader] = Loader) -> dict:
    """A YAML or JSON file that holds one mapping."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}; give the path of a YAML or JSON file")
    try:
        content = yaml.load(path.read_text(), loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML or JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping of names to values, got {type(content).__name__}")
    return content


def read_options(kind: type, name: str, text: str, leave_out: tuple[str, ...] = ()) -> dict:
    """Options of the dataclass `kind`, called `name`, from JSON text; names and plain types are checked."""
    options = {option.name: option for option in dataclasses.fields(kind) if option.name not in leave_out}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"task_options is not JSON ({error.msg}): {text}") from error
    if not isinstance(values, dict):
        raise ValueError(f'task_options must be an object such as {{"{next(iter(options))}": ...}}, got {text}')
    for option, value in values.items():
        if option not in options:
            raise ValueError(f"task {name} has no option {option!r}{near_match(option, list(options))}")
        default, several = options[option].default, "tuple" in str(options[option].type)
        fitting = (int, float) if type(default) is float else (type(default),)
        if not several and isinstance(default, bool | int | float | str) and type(value) not in fitting:
            raise ValueError(f"task_options: {option} must be of type {type(default).__name__}, got {value!r}")
    return values


def to_flags(values: dict) -> list[str]:
    """The command line that says the same as a flat mapping; None leaves the default."""
    flags = []
    for name, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        texts = [json.dumps(_numbers(item)) if isinstance(item, dict) else str(item) for item in items]
        # alone, -1e-3 would be taken for a flag
        flags += [f"--{name}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("-") else [f"--{name}", *texts]
    return flags


def _numbers(value):
    """Inner mappings become JSON, which knows 1e-3 as a number: it was one in the file."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and EXPONENT.match(value) else value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside the arguments, and the script's docstring as it is written."""


def parse(dataclass_types: list[type], argv: list[str], description: str) -> tuple:
    """Instances of the dataclasses from `--config FILE` and the flags of `argv`, which override the file."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, flags = first.parse_known_args(argv)
    parser = HfArgumentParser(
        dataclass_types,
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="flat YAML file with any of these arguments; flags override it")
    if known.config:
        values = read_mapping(known.config)
        names = [field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)]
        for name in values:
            if name not in names:
                raise ValueError(f"{known.config}: unknown argument {name!r}{near_match(str(name), names)}")
        flags = to_flags(values) + flags
    return parser.parse_args_into_dataclasses(flags)[: len(dataclass_types)]
