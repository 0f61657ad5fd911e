"""A small disk in memory that can be full for a while. It needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

SIZE = 8 << 20
BLOCK = bytes(4096)


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = f"size={SIZE},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "paramhub", str(folder)], check=True)
        self.is_full = False

    def fill(self) -> None:
        """Takes all room that is left. While the disk is to be full this is done again and again, since a program that
        removes a file makes room."""
        self.is_full = True
        file = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            with contextlib.suppress(OSError):
                while os.write(file, BLOCK):
                    pass
        finally:
            os.close(file)

    def free(self) -> None:
        self.is_full = False
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def close(self) -> None:
        """Unmounts it. The processes that have files there should have ended before."""
        if subprocess.run(["umount", str(self.folder)], check=False).returncode != 0:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
