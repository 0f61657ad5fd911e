"""Ray Train's recipe of docs/pytorch.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import recipes
from launching import PYTHON, Ended

pytestmark = recipes.needs("ray")

PROGRAM = """
import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import paramhub
import recipes

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")


def train():
    import paramhub.torch

    rank, points = ray.train.get_context().get_world_rank(), recipes.Points()
    plain, ours = recipes.network(), recipes.network()
    prepared = prepare_model(plain)
    assert torch.distributed.get_backend() == "paramhub"
    pairs = [
        (prepared, recipes.sgd(prepared)),
        (ours, paramhub.torch.HubOptimizer(ours, paramhub.SGD(lr=recipes.LR, momentum=0.9))),
    ]
    seen = []
    for step in range(recipes.STEPS):
        begin = (2 * step + rank) * recipes.BATCH
        at = torch.arange(begin, begin + recipes.BATCH)
        seen.append(at)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            recipes.loss_of(model(points.inputs[at]), points.labels[at]).backward()
            optimizer.step()
    for name, model in (("backend", plain), ("optimizer", ours)):
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        recipes.check_trained(model, seen, rank, folder)
    pairs[1][1].close()


"""


def test_ray_train(launch: Callable[..., Ended], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        f"from pathlib import Path\nFOLDER = Path({str(tmp_path)!r})\n{PROGRAM}" + recipes.recipe("Ray Train")
    )
    # Ray's workers have the environment of the program that starts them.
    paths = [str(Path(recipes.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    code, output = launch(
        PYTHON, program, env={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}, timeout=400
    )
    assert code == 0, output
