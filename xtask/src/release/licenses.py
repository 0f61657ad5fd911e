"""Prints the licence texts of the crates in a program or library of this workspace: ``licenses.py PACKAGE TARGET``.

A text that several crates have in the same words is printed once. Fails if a crate's package has none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NAMES = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
"""How the names of files with licences begin."""

RULE = "-" * 78


def cargo(*arguments: str) -> str:
    return subprocess.run(["cargo", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def linked_crates(package: str, target: str) -> set[tuple[str, str]]:
    """Name and version of every crate whose code is linked: no build scripts, no procedural macros, no tests."""
    tree = cargo(
        *("tree", "--locked", "--package", package, "--target", target),
        *("--edges", "normal,no-proc-macro", "--prefix", "none", "--no-dedupe", "--format", "{p}"),
    )
    # `name v1.2.3`, and for a crate of the workspace its folder after that.
    crates = [line.split() for line in tree.splitlines()]
    return {(words[0], words[1].removeprefix("v")) for words in crates if len(words) == 2}


def licence_texts(crate: dict) -> list[str]:
    folder = Path(crate["manifest_path"]).parent
    named_so = [file for file in sorted(folder.rglob("*")) if NAMES.match(file.name) and file.is_file()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in named_so if file.suffix != ".rs"]
    if not texts:
        sys.exit(
            f"the package of {crate['name']} {crate['version']} lacks the text of its licence, {crate['license']}"
        )
    return texts


def main() -> None:
    package, target = sys.argv[1:]
    wanted = linked_crates(package, target)
    known = json.loads(cargo("metadata", "--format-version", "1", "--locked", "--filter-platform", target))
    crates = [crate for crate in known["packages"] if (crate["name"], crate["version"]) in wanted]
    assert len(crates) == len(wanted), wanted - {(crate["name"], crate["version"]) for crate in crates}

    users_of: dict[str, list[str]] = defaultdict(list)
    as_written: dict[str, str] = {}
    for crate in sorted(crates, key=lambda crate: (crate["name"], crate["version"])):
        print(f"{crate['name']} {crate['version']}: {crate['license']}")
        for text in licence_texts(crate):
            words = " ".join(text.split())
            as_written.setdefault(words, text)
            users_of[words].append(f"{crate['name']} {crate['version']}")
    for words, users in users_of.items():
        print(f"\n{RULE}\n{', '.join(dict.fromkeys(users))}\n{RULE}\n\n{as_written[words].strip()}")


main()
