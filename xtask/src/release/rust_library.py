"""Prints the notices of Rust's standard library, a page of HTML that rustc comes with, as text: ``rust_library.py PAGE``."""

from __future__ import annotations

import html.parser
import re
import sys
from pathlib import Path

BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "pre", "summary", "br"}


class Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipped += tag in {"head", "style"}
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in {"head", "style"}
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data)


parser = Text()
parser.feed(Path(sys.argv[1]).read_text(encoding="utf-8"))
lines = [line.rstrip() for line in "".join(parser.parts).splitlines()]
print(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip())
