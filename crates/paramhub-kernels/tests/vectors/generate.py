"""Writes optimizers.json: what torch.optim's formulas give for a few small problems.

The formulas are the ones in the documentation of torch.optim's optimizers
(https://docs.pytorch.org/docs/stable/optim.html), and those of Lion, LARS and LAMB in their papers, evaluated in 64-bit floats by the standard library alone, so
that they share no code and no rounding with the kernels. Inputs are exact 32-bit floats.

    python3 generate.py                 # writes optimizers.json
    python3 generate.py --check-torch   # compares it with the torch that is installed

Verified against torch 2.15.0 (CPU, float32).
"""

import json
import math
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
    ("sgd, maximize", "sgd", dict(learning_rate=0.1, momentum=0.9, weight_decay=0.01, maximize=True), None),
    ("adam, amsgrad", "adam", dict(learning_rate=0.02, beta2=0.5, amsgrad=True), None),
    ("adam, amsgrad, maximize, weight decay", "adam",
     dict(learning_rate=0.02, beta1=0.3, beta2=0.5, weight_decay=0.1, amsgrad=True, maximize=True), None),
    ("adamw, amsgrad", "adamw", dict(learning_rate=0.02, beta2=0.5, weight_decay=0.1, amsgrad=True), None),
    ("adagrad", "adagrad", dict(learning_rate=0.1, epsilon=1e-10), None),
    ("adagrad, all options", "adagrad",
     dict(learning_rate=0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator=0.3, epsilon=1e-3), None),
    ("adagrad, maximize", "adagrad", dict(learning_rate=0.1, epsilon=1e-10, maximize=True), None),
    ("rmsprop", "rmsprop", dict(learning_rate=0.01), None),
    ("rmsprop, weight decay", "rmsprop", dict(learning_rate=0.01, alpha=0.9, weight_decay=0.1), None),
    ("rmsprop, momentum", "rmsprop", dict(learning_rate=0.01, alpha=0.9, momentum=0.8), None),
    ("rmsprop, centered", "rmsprop", dict(learning_rate=0.01, alpha=0.9, centered=True, epsilon=1e-3), None),
    ("rmsprop, centered, small alpha, momentum, maximize", "rmsprop",
     dict(learning_rate=0.01, alpha=0.4, centered=True, momentum=0.8, epsilon=1e-2, maximize=True), None),
    ("adadelta", "adadelta", dict(learning_rate=1.0, epsilon=1e-6), None),
    ("adadelta, all options", "adadelta",
     dict(learning_rate=0.5, rho=0.7, epsilon=1e-3, weight_decay=0.1, maximize=True), None),
    ("lion", "lion", dict(learning_rate=1e-2, beta2=0.99), None),
    ("lion, weight decay, maximize", "lion",
     dict(learning_rate=1e-2, beta1=0.8, beta2=0.95, weight_decay=0.1, maximize=True), lambda t: 1.0 / t),
    ("nadam", "nadam", dict(learning_rate=0.02), None),
    ("nadam, weight decay, maximize, falling learning rate", "nadam",
     dict(learning_rate=0.02, beta1=0.8, weight_decay=0.1, momentum_decay=0.5, maximize=True), lambda t: 1.0 / t),
    ("nadam, decoupled weight decay", "nadam",
     dict(learning_rate=0.02, beta1=0.3, beta2=0.9, weight_decay=0.1, epsilon=1e-3, decoupled=True), None),
    ("lars", "lars", dict(learning_rate=2.0, momentum=0.9), None),
    ("lars, no momentum", "lars", dict(learning_rate=2.0, trust_coefficient=0.02), None),
    ("lars, weight decay, maximize, falling learning rate", "lars",
     dict(learning_rate=4.0, momentum=0.8, weight_decay=0.1, trust_coefficient=0.01, maximize=True), lambda t: 1.0 / t),
    ("lamb", "lamb", dict(learning_rate=0.02, weight_decay=0.01, epsilon=1e-6), None),
    ("lamb, no decay, falling learning rate", "lamb",
     dict(learning_rate=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3), lambda t: 1.0 / t),
    ("lamb, maximize", "lamb", dict(learning_rate=0.02, weight_decay=0.1, maximize=True), None),
    # MXNet's.
    ("rmsprop, epsilon in the root", "rmsprop", dict(learning_rate=0.01, alpha=0.9, epsilon=1e-3, epsilon_in_root=True), None),
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
    m, v, *largest = state
    if decoupled:
        p = p - h["learning_rate"] * h["weight_decay"] * p
    elif h["weight_decay"] != 0:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    if largest:
        largest = [max(largest[0], v)]
    m_hat = m / (1 - h["beta1"] ** t)
    v_hat = (largest or [v])[0] / (1 - h["beta2"] ** t)
    return p - h["learning_rate"] * m_hat / (v_hat ** 0.5 + h["epsilon"]), [m, v, *largest]


def adamw(h, t, p, g, state):
    return adam(h, t, p, g, state, decoupled=True)


def adagrad(h, t, p, g, state):
    (s,) = state
    if t == 1:
        s = h.get("initial_accumulator", 0)
    g = g + h["weight_decay"] * p
    s = s + g * g
    rate = h["learning_rate"] / (1 + (t - 1) * h.get("lr_decay", 0))
    return p - rate * g / (s ** 0.5 + h["epsilon"]), [s]


def rmsprop(h, t, p, g, state):
    alpha = h.get("alpha", 0.99)
    v, *rest = state
    g = g + h["weight_decay"] * p
    v = alpha * v + (1 - alpha) * g * g
    variance = v
    if h.get("centered"):
        a = alpha * rest[0] + (1 - alpha) * g
        rest[0] = a
        variance = v - a * a
    in_root = h.get("epsilon_in_root")
    direction = g / ((variance + h["epsilon"]) ** 0.5 if in_root else variance ** 0.5 + h["epsilon"])
    if h["momentum"]:
        rest[-1] = direction = h["momentum"] * rest[-1] + direction
    return p - h["learning_rate"] * direction, [v, *rest]


def adadelta(h, t, p, g, state):
    rho = h.get("rho", 0.9)
    v, u = state
    g = g + h["weight_decay"] * p
    v = rho * v + (1 - rho) * g * g
    d = ((u + h["epsilon"]) / (v + h["epsilon"])) ** 0.5 * g
    u = rho * u + (1 - rho) * d * d
    return p - h["learning_rate"] * d, [v, u]


def nadam(h, t, p, g, state):
    m, v = state
    if h.get("decoupled"):
        p = p - h["learning_rate"] * h["weight_decay"] * p
    else:
        g = g + h["weight_decay"] * p
    mu = [h["beta1"] * (1 - 0.5 * 0.96 ** (i * h.get("momentum_decay", 0.004))) for i in range(1, t + 2)]
    product = math.prod(mu[:-1])
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    d = (v / (1 - h["beta2"] ** t)) ** 0.5 + h["epsilon"]
    p = p - h["learning_rate"] * (1 - mu[-2]) / (1 - product) * g / d
    return p - h["learning_rate"] * mu[-1] / (1 - product * mu[-1]) * m / d, [m, v]


def lion(h, t, p, g, state):
    (m,) = state
    direction = h["beta1"] * m + (1 - h["beta1"]) * g
    sign = (direction > 0) - (direction < 0)
    p = p - h["learning_rate"] * h["weight_decay"] * p - h["learning_rate"] * sign
    return p, [h["beta2"] * m + (1 - h["beta2"]) * g]


def lars(h, t, p, g, state):
    v = (state[0] if state else 0.0) * h["momentum"] + h["learning_rate"] * h["ratio"] * (g + h["weight_decay"] * p)
    return p - v, [v] if state else []


def lars_ratio(h, t, values, gradient, states):
    p, g = norm(values), norm(gradient)
    return h.get("trust_coefficient", 0.001) * p / (g + h["weight_decay"] * p)


def lamb_update(h, t, p, g, state):
    m, v = state
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    m_hat = m / (1 - h["beta1"] ** t)
    v_hat = v / (1 - h["beta2"] ** t)
    return m_hat / (v_hat ** 0.5 + h["epsilon"]) + h["weight_decay"] * p, [m, v]


def lamb(h, t, p, g, state):
    update, state = lamb_update(h, t, p, g, state)
    return p - h["learning_rate"] * h["ratio"] * update, state


def lamb_ratio(h, t, values, gradient, states):
    updates = [lamb_update(h, t, p, g, state)[0] for p, g, state in zip(values, gradient, states)]
    return norm(values) / norm(updates)


def norm(values):
    return math.sqrt(math.fsum(value * value for value in values))


RATIOS = dict(lars=lars_ratio, lamb=lamb_ratio)
RULES = dict(mean=mean, sgd=sgd, adam=adam, adamw=adamw, adagrad=adagrad, rmsprop=rmsprop,
             adadelta=adadelta, lion=lion, nadam=nadam, lars=lars, lamb=lamb)


def slots_of(optimizer, h):
    if optimizer in ("adam", "adamw"):
        return 2 + bool(h.get("amsgrad"))
    if optimizer == "rmsprop":
        return 1 + bool(h["momentum"]) + bool(h.get("centered"))
    if optimizer in ("sgd", "lars"):
        return int(h["momentum"] != 0)
    return dict(mean=0, adagrad=1, adadelta=2, lion=1, nadam=2, lamb=2)[optimizer]


def run(name, optimizer, changes, schedule, rng):
    hyperparameters = {**DEFAULTS, **changes}
    slots = slots_of(optimizer, hyperparameters)
    model = [f32(rng.gauss(0, 1)) for _ in range(PARAMETERS)]
    case = dict(name=name, optimizer=optimizer, model=model, steps=[])
    values, states = list(model), [[0.0] * slots for _ in model]
    for t in range(1, STEPS + 1):
        h = dict(hyperparameters)
        if schedule:
            h["learning_rate"] *= schedule(t)
        # From gradients near 1 to gradients near 1e-4, so that epsilon matters in some.
        gradient = [f32(rng.gauss(0, 10.0 ** -(i % 5))) for i in range(PARAMETERS)]
        signed = [-g if h.get("maximize") else g for g in gradient]
        of_step = h
        if optimizer in RATIOS:
            of_step = {**h, "ratio": RATIOS[optimizer](h, t, values, signed, states)}
        for i, g in enumerate(signed):
            values[i], states[i] = RULES[optimizer](of_step, t, values[i], g, states[i])
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
        first = case["steps"][0]["hyperparameters"]
        if case["optimizer"] in ("mean", "lion", "lars", "lamb") or first.get("epsilon_in_root"):
            continue
        p = torch.tensor(case["model"], dtype=torch.float32, requires_grad=True)
        options = dict(lr=first["learning_rate"], weight_decay=first["weight_decay"],
                       maximize=first.get("maximize", False))
        if case["optimizer"] == "sgd":
            rule = torch.optim.SGD([p], momentum=first["momentum"], dampening=first["dampening"],
                                   nesterov=first["nesterov"], **options)
            names = ["momentum_buffer"]
        elif case["optimizer"] in ("adam", "adamw"):
            kind = torch.optim.Adam if case["optimizer"] == "adam" else torch.optim.AdamW
            rule = kind([p], betas=(first["beta1"], first["beta2"]), eps=first["epsilon"],
                        amsgrad=first.get("amsgrad", False), **options)
            names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        elif case["optimizer"] == "adagrad":
            rule = torch.optim.Adagrad([p], lr_decay=first.get("lr_decay", 0), eps=first["epsilon"],
                                       initial_accumulator_value=first.get("initial_accumulator", 0),
                                       **options)
            names = ["sum"]
        elif case["optimizer"] == "rmsprop":
            rule = torch.optim.RMSprop([p], alpha=first.get("alpha", 0.99), eps=first["epsilon"],
                                       momentum=first["momentum"], centered=first.get("centered", False),
                                       **options)
            names = ["square_avg", *["grad_avg"] * bool(first.get("centered")), "momentum_buffer"]
        elif case["optimizer"] == "nadam":
            rule = torch.optim.NAdam([p], betas=(first["beta1"], first["beta2"]), eps=first["epsilon"],
                                     momentum_decay=first.get("momentum_decay", 0.004),
                                     decoupled_weight_decay=first.get("decoupled", False), **options)
            names = ["exp_avg", "exp_avg_sq"]
        else:
            rule = torch.optim.Adadelta([p], rho=first.get("rho", 0.9), eps=first["epsilon"], **options)
            names = ["square_avg", "acc_delta"]
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
