"""Fails if a wheel or program needs more of the system that loads it than it should: see ``audit.py --help``."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import zipfile

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# The parts of the C library, which is on every Linux system that is not made for musl.
ALLOWED = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def audit_file(name: str, content: bytes, glibc: str) -> None:
    sections = list(ELFFile(io.BytesIO(content)).iter_sections())
    dynamic = next(section for section in sections if isinstance(section, DynamicSection))
    libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    needs = [section for section in sections if isinstance(section, GNUVerNeedSection)]
    symbols = {
        symbol.name for section in needs for _, versions in section.iter_versions() for symbol in versions
    }
    newest = max((name.removeprefix("GLIBC_") for name in symbols if name.startswith("GLIBC_")), key=number)
    print(f"{name} needs {', '.join(sorted(libraries))}; glibc {newest} or newer")
    if unexpected := libraries - ALLOWED:
        sys.exit(f"{name} needs {', '.join(sorted(unexpected))}, which not every system has: what brings it?")
    if number(newest) > number(glibc):
        sys.exit(f"{name} needs glibc {newest}; {glibc} is promised. Was it linked by zig?")


def audit_wheel(path: str, glibc: str, platform: str) -> None:
    show = [sys.executable, "-m", "auditwheel", "show", "--json", path]
    shown = subprocess.run(show, stdout=subprocess.PIPE, text=True, check=True).stdout
    tag = json.loads(shown)["overall_tag"]
    print(f"auditwheel: {path} is consistent with {tag}")
    if tag != platform:
        sys.exit(f"auditwheel finds {tag} instead of {platform}: `auditwheel show {path}` says why")
    if platform not in path:
        sys.exit(f"the name of {path} lacks {platform}, so that pip would not install it on other systems")
    with zipfile.ZipFile(path) as wheel:
        natives = [name for name in wheel.namelist() if ".so" in name]
        assert natives, f"{path} has no native library"
        for name in natives:
            audit_file(name, wheel.read(name), glibc)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", help="a wheel, or a program")
    parser.add_argument("--glibc", required=True, help="the newest version of the C library that it may need")
    parser.add_argument(
        "--platform", required=True, help="the platform that auditwheel has to find for a wheel"
    )
    arguments = parser.parse_args()
    if arguments.file.endswith(".whl"):
        audit_wheel(arguments.file, arguments.glibc, arguments.platform)
    else:
        with open(arguments.file, "rb") as file:
            audit_file(arguments.file, file.read(), arguments.glibc)


main()
