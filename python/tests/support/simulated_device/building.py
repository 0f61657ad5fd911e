"""Builds the library of the simulated devices, once for each version of torch and of the sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
BUILT = FOLDER.parents[3] / "target" / "python" / "simulated-device"
"""The repository's folder of built libraries. Each has a folder of its own."""
OPTIONS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-stringop-overflow"]
"""g++ 12 warns of an overflow in torch's reference counts, where there is none."""
TIMEOUT = 600.0


def library() -> Path:
    """The library's file, which is built if it does not exist. Processes that build it at the same time do no harm."""
    folder = BUILT / _key()
    file = folder / "simulated_device.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            partial = Path(own) / file.name
            _build(partial)
            partial.replace(file)
    return file


def _sources() -> list[Path]:
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def _key() -> str:
    digest = hashlib.sha256(" ".join(OPTIONS).encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = "".join(letter if letter.isalnum() else "-" for letter in torch.__version__)
    return f"torch-{version}-{digest.hexdigest()[:16]}"


def _build(to: Path) -> None:
    of_torch = Path(torch.__file__).parent
    libraries = of_torch / "lib"
    ended = subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            *OPTIONS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            # Warnings of torch's own headers say nothing about these sources.
            "-isystem",
            str(of_torch / "include"),
            *[str(path) for path in _sources() if path.suffix == ".cpp"],
            f"-L{libraries}",
            f"-Wl,-rpath,{libraries}",
            "-ltorch_cpu",
            "-lc10",
            "-o",
            str(to),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"the simulated device cannot be built:\n{ended.stdout}")
    if ended.stdout:
        print(ended.stdout, file=sys.stderr)
