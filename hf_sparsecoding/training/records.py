"""Prompt-completion records from the user's own files, with errors that point at the line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


REQUIRED = ("prompt", "completion")
LINES, LIST = (".jsonl", ".ndjson"), (".json",)


def read(path: str | Path) -> list[dict]:
    """Records {"prompt", "completion", optional "rule"} of a .jsonl file (one a line) or a .json file (a list)."""
    path = Path(path)
    if path.suffix not in LINES + LIST:
        raise ValueError(f"{path} must end in {', '.join(LINES + LIST)}; convert it to one JSON record per line")
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    text = path.read_text(encoding="utf-8")
    entries = _lines(path, text) if path.suffix in LINES else _list(path, text)
    records = [_checked(place, entry) for place, entry in entries]
    if not records:
        raise ValueError(f"{path} holds no records; write one {{'prompt': ..., 'completion': ...}} per line")
    return records


def _lines(path: Path, text: str) -> list[tuple[str, object]]:
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
    return entries


def _list(path: Path, text: str) -> list[tuple[str, object]]:
    """Entry by entry, so that each knows its line."""
    decoder, place, entries = json.JSONDecoder(), 0, []

    def following() -> str:
        nonlocal place
        while place < len(text) and text[place] in " \t\r\n":
            place += 1
        return text[place : place + 1]

    def line() -> str:
        return f"{path}:{text.count(chr(10), 0, place) + 1}"

    if following() != "[":
        raise ValueError(f"{line()}: a .json file must hold a list of records; use .jsonl for one record per line")
    place += 1
    while following() != "]" or entries:
        where = line()
        try:
            entry, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from error
        entries.append((where, entry))
        if following() == "]":
            break
        if following() != ",":
            raise ValueError(f"{line()}: not JSON (a comma or the end of the list must follow a record)")
        place += 1
        following()
    place += 1
    if following():
        raise ValueError(f"{line()}: text after the end of the list; a .json file holds one list")
    return entries


def _checked(place: str, entry: object) -> dict:
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: a record must be an object with prompt and completion, got {entry!r}")
    missing = [name for name in REQUIRED if name not in entry]
    if missing:
        raise ValueError(f"{place}: the record lacks {' and '.join(missing)}; it has {', '.join(entry) or 'nothing'}")
    for name in REQUIRED:
        if not isinstance(entry[name], str) or not entry[name]:
            raise ValueError(f"{place}: {name} must be text that is not empty, got {entry[name]!r}")
    return entry


def hold_out(records: list[dict], share: float, seed: int) -> tuple[list[dict], list[dict]]:
    """(training, held-out) records: a share of them, at least one, chosen by the seed."""
    if not 0 < share < 1:
        raise ValueError(f"held_out_share must be between 0 and 1, both excluded, got {share}")
    if len(records) < 2:
        raise ValueError(f"{len(records)} record cannot be split; give more records or eval_data")
    held_out = min(max(1, round(share * len(records))), len(records) - 1)
    order = np.random.default_rng(seed).permutation(len(records))
    return [records[i] for i in sorted(order[held_out:])], [records[i] for i in sorted(order[:held_out])]
