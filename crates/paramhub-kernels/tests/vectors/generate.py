"""Writes optimizers.json: what torch.optim's formulas give for a few small problems.

The formulas are the ones in the documentation of torch.optim.SGD, torch.optim.Adam and torch.optim.AdamW
(https://docs.pytorch.org/docs/stable/optim.html), evaluated in 64-bit floats by the standard library alone, so
that they share no code and no rounding with the kernels. Inputs are exact 32-bit floats.

    python3 generate.py                 # writes optimizers.json
    python3 generate.py --check-torch   # compares it with the torch that is installed

Verified against torch 1.13.0 (CPU, float32, Debian 12's build).
"""

import json
import pathlib
import random
import struct
import sys

FILE = pathlib.Path(__file__).with_name("optimizers.json")
PARAMETERS = 19
STEPS = 5

DEFAULTS = dict(learning_rate=1e-3, momentum=0.0, dampening=0.0, nesterov=False,
                weight_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8)

# name, optimizer, hyperparameters, learning rate of step t as a factor
CASES = [
    ("mean", "mean", {}, None),
    ("sgd", "sgd", dict(learning_rate=0.1), None),
    ("sgd, weight decay", "sgd", dict(learning_rate=0.1, weight_decay=0.01), None),
    ("sgd, momentum", "sgd", dict(learning_rate=0.1, momentum=0.9), None),
    ("sgd, momentum, dampening", "sgd", dict(learning_rate=0.1, momentum=0.9, dampening=0.3), None),
    ("sgd, momentum, dampening, weight decay", "sgd",
     dict(learning_rate=0.1, momentum=0.8, dampening=0.5, weight_decay=0.05), None),
    ("sgd, nesterov", "sgd", dict(learning_rate=0.1, momentum=0.9, nesterov=True), None),
    ("sgd, nesterov, weight decay", "sgd",
     dict(learning_rate=0.05, momentum=0.95, nesterov=True, weight_decay=0.001), None),
    ("sgd, nesterov, falling learning rate", "sgd",
     dict(learning_rate=0.1, momentum=0.9, nesterov=True), lambda t: 0.5 ** (t // 2)),
    ("adam", "adam", {}, None),
    ("adam, weight decay", "adam", dict(learning_rate=0.01, weight_decay=0.1), None),
    ("adam, other betas and epsilon", "adam",
     dict(learning_rate=0.02, beta1=0.8, beta2=0.95, epsilon=1e-3), None),
    ("adam, beta1 under a half", "adam", dict(learning_rate=0.02, beta1=0.3), None),
    ("adam, no first moment", "adam", dict(learning_rate=0.02, beta1=0.0), None),
    ("adam, falling learning rate", "adam", dict(learning_rate=0.02), lambda t: 1.0 / t),
    ("adamw", "adamw", dict(weight_decay=0.01), None),
    ("adamw, no decay", "adamw", {}, None),
    ("adamw, strong decay", "adamw", dict(learning_rate=0.05, weight_decay=0.5), None),
    ("adamw, falling learning rate", "adamw",
     dict(learning_rate=0.05, weight_decay=0.1), lambda t: 1.0 / t),
]


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def digits(value):
    """Ten significant ones: a thousand times finer than float32."""
    return float(f"{value:.10g}")


def mean(h, t, p, g, state):
    return g, []


def sgd(h, t, p, g, state):
    if h["weight_decay"] != 0:
        g = g + h["weight_decay"] * p
    if h["momentum"] != 0:
        b = g if t == 1 else h["momentum"] * state[0] + (1 - h["dampening"]) * g
        state = [b]
        g = g + h["momentum"] * b if h["nesterov"] else b
    return p - h["learning_rate"] * g, state


def adam(h, t, p, g, state, decoupled=False):
    m, v = state
    if decoupled:
        p = p - h["learning_rate"] * h["weight_decay"] * p
    elif h["weight_decay"] != 0:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    m_hat = m / (1 - h["beta1"] ** t)
    v_hat = v / (1 - h["beta2"] ** t)
    return p - h["learning_rate"] * m_hat / (v_hat ** 0.5 + h["epsilon"]), [m, v]


def adamw(h, t, p, g, state):
    return adam(h, t, p, g, state, decoupled=True)


RULES = dict(mean=mean, sgd=sgd, adam=adam, adamw=adamw)


def run(name, optimizer, changes, schedule, rng):
    hyperparameters = {**DEFAULTS, **changes}
    slots = 2 if optimizer.startswith("adam") else 1 if hyperparameters["momentum"] else 0
    model = [f32(rng.gauss(0, 1)) for _ in range(PARAMETERS)]
    case = dict(name=name, optimizer=optimizer, model=model, steps=[])
    values, states = list(model), [[0.0] * slots for _ in model]
    for t in range(1, STEPS + 1):
        h = dict(hyperparameters)
        if schedule:
            h["learning_rate"] *= schedule(t)
        # From gradients near 1 to gradients near 1e-4, so that epsilon matters in some.
        gradient = [f32(rng.gauss(0, 10.0 ** -(i % 5))) for i in range(PARAMETERS)]
        for i, g in enumerate(gradient):
            values[i], states[i] = RULES[optimizer](h, t, values[i], g, states[i])
        case["steps"].append(dict(
            hyperparameters=h,
            gradient=gradient,
            model=[digits(value) for value in values],
            state=[[digits(state[slot]) for state in states] for slot in range(slots)],
        ))
    return case


def check_torch(cases):
    import torch

    worst = 0.0
    for case in cases:
        if case["optimizer"] == "mean":
            continue
        first = case["steps"][0]["hyperparameters"]
        p = torch.tensor(case["model"], dtype=torch.float32, requires_grad=True)
        common = dict(lr=first["learning_rate"], weight_decay=first["weight_decay"])
        if case["optimizer"] == "sgd":
            rule = torch.optim.SGD([p], momentum=first["momentum"], dampening=first["dampening"],
                                   nesterov=first["nesterov"], **common)
            names = ["momentum_buffer"]
        else:
            kind = torch.optim.Adam if case["optimizer"] == "adam" else torch.optim.AdamW
            rule = kind([p], betas=(first["beta1"], first["beta2"]), eps=first["epsilon"], **common)
            names = ["exp_avg", "exp_avg_sq"]
        for step in case["steps"]:
            rule.param_groups[0]["lr"] = step["hyperparameters"]["learning_rate"]
            p.grad = torch.tensor(step["gradient"], dtype=torch.float32)
            rule.step()
            pairs = [(p.detach(), step["model"])]
            pairs += [(rule.state[p][name], want) for name, want in zip(names, step["state"])]
            for got, want in pairs:
                scale = max(map(abs, want))
                for g, w in zip(got.tolist(), want):
                    error = abs(g - w) / (abs(w) + 0.1 * scale)
                    worst = max(worst, error)
                    assert error < 1e-6, (case["name"], g, w)
    print(f"torch {torch.__version__} agrees; largest error {worst:.1e}")


def main():
    rng = random.Random(20)
    cases = [run(*case, rng) for case in CASES]
    if "--check-torch" in sys.argv[1:]:
        assert json.loads(FILE.read_text()) == cases, "optimizers.json is not what this script writes"
        check_torch(cases)
        return
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    FILE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
