"""Run in an environment that has the wheel and nothing else."""

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

begin = time.perf_counter()
import paramhub  # noqa: E402

took = time.perf_counter() - begin
print(f"import paramhub took {took:.3f} s; 0.3 s is what we aim for")
taken = {"torch", "numpy", "jax", "asyncio"} & sys.modules.keys()
assert not taken, f"importing paramhub imports {taken}"

version = importlib.metadata.version("paramhub")
assert paramhub.__version__ == version, (paramhub.__version__, version)
package = Path(paramhub.__file__).parent
assert package.is_relative_to(sys.prefix), f"{package} is not what was installed"
files = [str(file) for file in importlib.metadata.files("paramhub") or ()]
for needed in ("paramhub/py.typed", "paramhub/_native.pyi", "paramhub/torch/__init__.py"):
    assert needed in files, f"the wheel lacks {needed}"
unwanted = [file for file in files if "tests" in file]
assert not unwanted, f"the wheel has {unwanted}"

program = Path(sys.prefix) / "bin" / "paramhub"
for command in ([str(program)], [sys.executable, "-I", "-m", "paramhub"]):
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["paramhub", version], shown

try:
    import paramhub.torch
except ModuleNotFoundError as error:
    assert error.name == "torch", error
else:
    raise AssertionError("there is no torch here")
