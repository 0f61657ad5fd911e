"""The programs of `examples/pytorch` and the README's, as users start them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, TORCHRUN, Ended

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "pytorch"

FULL = pytest.mark.full


@pytest.mark.parametrize(
    "way", ["optimizer", *(pytest.param(way, marks=FULL) for way in ("hook", "backend", "distributed"))]
)
def test_the_digits_are_learnt_by_every_way(launch: Callable[..., Ended], way: str) -> None:
    code, output = launch(*TORCHRUN, "--nproc-per-node=4", EXAMPLES / "digits.py", "--way", way)
    assert code == 0, output
    assert output.count("rank 0 runs the hub") == 1, output
    reached = re.search(rf"way {way}: test accuracy ([0-9.]+) with 4 ranks", output)
    assert reached is not None, output
    assert float(reached[1]) > 0.93, output


def test_the_digits_are_learnt_with_a_layer_by_its_factors(launch: Callable[..., Ended]) -> None:
    code, output = launch(
        *TORCHRUN, "--nproc-per-node=2", EXAMPLES / "digits.py", "--way=schemes", "--epochs=6"
    )
    assert code == 0, output
    assert "layers 7, 9 go by factors: it moves least" in output, output
    reached = re.search("way schemes: test accuracy ([0-9.]+) with 2 ranks", output)
    assert reached is not None and float(reached[1]) > 0.93, output


@pytest.mark.parametrize(
    "kind", ["hub", *(pytest.param(kind, marks=FULL) for kind in ("funnel", "concom", "depcha"))]
)
def test_the_digits_are_learnt_through_every_store(launch: Callable[..., Ended], kind: str) -> None:
    script = (EXAMPLES / "kvstore_digits.py", "--kvstore", kind, "--epochs=7")
    code, output = launch(*PARAMHUB, "run", "-n", "4", "--", PYTHON, *script)
    assert code == 0, output
    reached = re.search(rf"store {kind}: test accuracy ([0-9.]+) with 4 ranks", output)
    assert reached is not None and float(reached[1]) > 0.93, output


@FULL
def test_the_horovod_script(launch: Callable[..., Ended]) -> None:
    code, output = launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, EXAMPLES / "horovod_digits.py")
    assert code == 0, output


@FULL
def test_the_transformer_learns_with_bf16_gradients(launch: Callable[..., Ended]) -> None:
    code, output = launch(
        *TORCHRUN, "--nproc-per-node=4", EXAMPLES / "char_transformer.py", "--steps=60", "--batch=4"
    )
    assert code == 0, output
    losses = re.search(r"loss ([0-9.]+) at first, ([0-9.]+) at last; a guess has ([0-9.]+)", output)
    assert losses is not None, output
    first, last, guess = map(float, losses.groups())
    assert abs(first - guess) < 1, "it begins as a guess"
    assert last < first - 1, output


def test_the_readme_s_script(launch: Callable[..., Ended], tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## With PyTorch") :]
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])
    code, output = launch(*TORCHRUN, "--nproc-per-node=4", script)
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([0-9.]+)", output)]
    assert len(losses) == 4, output
    assert losses[-1] < losses[0] / 2, output
