"""The tensors that are exchanged: a list in models/, a file of the same form, or a list made by a rule.

Every peer gets the same file, and so does paramhub, so no name can mean different models.
"""

import json
import math
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"
F32_BYTES = 4


class KeyList:
    def __init__(self, model: str, tensors: list):
        self.model = model
        self.tensors = tensors

    @property
    def elements(self) -> list:
        return [math.prod(tensor["shape"]) for tensor in self.tensors]

    @property
    def bytes(self) -> int:
        return F32_BYTES * sum(self.elements)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"model": self.model, "tensors": self.tensors}))


def named(name: str) -> KeyList:
    path = MODELS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in MODELS.glob("*.json")))
        raise SystemExit(f"--model {name}: there is no such list; there are {known}")
    return read(path)


def read(path: Path) -> KeyList:
    try:
        value = json.loads(path.read_text())
        tensors = value if isinstance(value, list) else value["tensors"]
        tensors = [{"name": tensor["name"], "shape": list(tensor["shape"])} for tensor in tensors]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--keys {path}: {error!r}; expected the form of the files in models/") from None
    model = path.stem if isinstance(value, list) else value.get("model", path.stem)
    return KeyList(model, tensors)


def many_small(count: int = 10_000, elements: int = 256) -> KeyList:
    """Many keys of 1 KB, which show the cost of a key and not that of its bytes."""
    tensors = [{"name": f"small.{number}", "shape": [elements]} for number in range(count)]
    return KeyList(f"{count} keys of {elements} elements", tensors)


def one_key(whole: KeyList) -> KeyList:
    """A single key with all elements of another list, which does not show the cost of a key."""
    tensor = {"name": "all", "shape": [sum(whole.elements)]}
    return KeyList(f"{whole.model} as one key", [tensor])


def scaled(whole: KeyList, scale: int) -> KeyList:
    """A list whose tensors have their numbers of elements divided by ``scale`` and rounded up, as with
    `paramhub bench exchange --scale`."""
    if scale == 1:
        return whole
    tensors = [
        {"name": tensor["name"], "shape": [-(-elements // scale)]}
        for tensor, elements in zip(whole.tensors, whole.elements)
    ]
    return KeyList(f"{whole.model} / {scale}", tensors)
