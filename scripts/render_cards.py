"""Render the model cards and the README's generated blocks from results.json.

python scripts/render_cards.py           # write what has changed
python scripts/render_cards.py --check   # write nothing; exit status 1 if anything would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_sparsecoding.reports.cards import render_all
from hf_sparsecoding.reports.results import write_text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default="model_cards", help="folder with one folder per experiment")
    parser.add_argument("--readme", default="README.md", help="file with generated blocks")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything would change")
    arguments = parser.parse_args(argv)
    if not Path(arguments.cards).is_dir():
        parser.error(f"no such folder: {arguments.cards}; run this in the project's folder or give --cards")
    texts = render_all(arguments.cards, arguments.readme)
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not arguments.check:
            write_text(path, texts[path])
        print(f"{'stale' if arguments.check else 'wrote'}: {path}")
    if arguments.check and stale:
        print("run python scripts/render_cards.py")
        return 1
    print(f"{len(texts)} files, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
