"""Writes models/*.json: the tensors of models of torchvision and of inception_bn.py, first layers first.

    pip install torch torchvision
    python bench/models/list_models.py models
    python bench/models/list_models.py models --only inception-bn    # which needs no torchvision

The weights of fully connected layers, outputs by inputs, are marked. ``positions`` is the number of places of one sample at
which a weight is applied: 1 for a fully connected layer, the area of the output for a convolution. A forward pass makes as many
multiplications and additions as the weight's elements times its positions. Tensors without ``positions`` take next to nothing.
Shapes and positions come from a pass without data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from inception_bn import inception_bn

# The side of the images, where it is not 224.
SIDES = {"inception_v3": 299}
NAMES = ["alexnet", "vgg11", "vgg19", "googlenet", "inception_v3", "resnet18", "resnet50", "resnet152"]
INCEPTION_BN = "inception-bn"


def model_of(name: str) -> tuple[torch.nn.Module, str]:
    """A model and its source. GoogLeNet and Inception are without their auxiliary classifiers, as in the papers' sizes."""
    if name == INCEPTION_BN:
        return inception_bn(), "bench/models/inception_bn.py, after MXNet's example"
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    source = f"torchvision {torchvision.__version__.partition('+')[0]}"
    return torchvision.models.get_model(name, weights=None, **more), source


def tensors(name: str) -> tuple[list[dict[str, object]], str]:
    """The tensors of one model, and its source."""
    with torch.device("meta"):
        model, source = model_of(name)
        model.eval()
        positions: dict[str, int] = {}

        fully_connected: set[str] = set()

        def note(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
            # Batch, channels, and an area if there is one.
            area = output.shape[2:].numel() if output.dim() > 2 else 1
            key = f"{names[module]}.weight"
            positions[key] = positions.get(key, 0) + area
            if isinstance(module, torch.nn.Linear):
                fully_connected.add(key)

        names = {module: path for path, module in model.named_modules()}
        for module in names:
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                module.register_forward_hook(note)
        side = SIDES.get(name, 224)
        model(torch.empty(1, 3, side, side))
    listed = [
        {
            "name": key,
            "shape": list(parameter.shape),
            **({"type": "fully-connected"} if key in fully_connected else {}),
            **({"positions": positions[key]} if key in positions else {}),
        }
        for key, parameter in model.named_parameters()
    ]
    return listed, source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[*NAMES, INCEPTION_BN])
    arguments = parser.parse_args()
    folder = arguments.folder
    for name in [arguments.only] if arguments.only else [*NAMES, INCEPTION_BN]:
        listed, source = tensors(name)
        lines = ",\n".join(map(json.dumps, listed))
        text = f'{{"model": "{name}", "source": "{source}", "tensors": [\n{lines}\n]}}\n'
        (folder / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
