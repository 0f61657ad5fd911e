"""Run in an environment that has the wheel and nothing else: shows that nothing can have been compiled there."""

import importlib.metadata
import os
import shutil
import sys

COMPILERS = ("cargo", "rustc", "rustup", "cc", "gcc", "c++", "g++", "clang", "zig", "ld", "make", "maturin")

found = {name: shutil.which(name) for name in COMPILERS if shutil.which(name)}
assert not found, f"a compiler can be reached: {found}"
print(f"Python {sys.version.split()[0]}, PATH={os.environ['PATH']}: no {', no '.join(COMPILERS)}")

distributions = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
assert distributions <= {"paramhub", "pip", "setuptools"}, distributions

distribution = importlib.metadata.distribution("paramhub")
licenses = {file.name: file for file in distribution.files or () if file.parent.name == "licenses"}
assert licenses.keys() == {"LICENSE-APACHE", "LICENSE-MIT", "THIRD_PARTY_LICENSES"}, licenses
crates = distribution.locate_file(licenses["THIRD_PARTY_LICENSES"]).read_text()
assert "pyo3" in crates and "ring" in crates, "the crates' licences are not those of the wheel"
