"""Steps that Muon and AdamW take to the same losses, on the same small language model, each with its best learning rate.

    python examples/muon_against_adamw.py [STEPS] [PICTURE]

Every rate of a sweep is tried from seed 0; the best of each optimizer is then run from two seeds more. Weights and batches
depend on the seed alone. Both have decay 0.1, β = (0.9, 0.95), gradients clipped to norm 1, 50 steps of warm-up and then a
constant rate, so that no run knows when it ends. MuonW orthogonalises the matrices within the blocks, queries, keys and values
apart; embeddings, output layer, biases and norms are AdamW's, at the same rate. 1000 steps take about seven minutes on one
core, without a GPU.
"""

import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from small_language_model import BATCH, LanguageModel, Text, draw_losses, drawn

from weft.optim import AdamW, MuonW

EVERY = 20  # steps from one test to the next
TARGETS = (2.5, 2.3, 2.1, 2.0, 1.9)  # nats a byte
RATES = {"AdamW": (1e-3, 2e-3, 4e-3, 8e-3), "MuonW": (2e-3, 4e-3, 8e-3, 1.6e-2)}
SEEDS = (0, 1, 2)


@dataclass
class Run:
    rate: float
    losses: list[float]  # one every EVERY steps

    def steps_to(self, loss: float) -> float:
        return next((EVERY * (i + 1) for i, x in enumerate(self.losses) if x <= loss), math.inf)


def adamw(model: LanguageModel):
    return AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))


def muon(model: LanguageModel):
    blocks = list(model.blocks.named_parameters())
    groups = [
        {"params": [p for name, p in blocks if "qkv.weight" in name], "split_rows": 3},
        {"params": [p for name, p in blocks if "qkv.weight" not in name]},
        {"params": [model.embedding.weight, model.places, *model.head.parameters()], "use_muon": False},
    ]
    return MuonW(
        groups,
        weight_decay=0.1,
        adamw_betas=(0.9, 0.95),
        adjust_lr_fn="match_rms_adamw",
        ns_dtype=torch.float32,  # a CPU has no fast bf16 products
    )


MADE = {"AdamW": adamw, "MuonW": muon}


def train(name: str, rate: float, seed: int, steps: int, text: Text) -> Run:
    torch.manual_seed(seed)
    model = LanguageModel()
    generator = torch.Generator().manual_seed(100 + seed)
    optimizer = MADE[name](model)
    losses = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / 50, 1.0)
        advance(model, optimizer, drawn(text.known, BATCH, generator))
        if step % EVERY == 0:
            with torch.no_grad():
                losses.append(float(model(text.test)))
    return Run(rate, losses)


def advance(model: LanguageModel, optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def ms_per_step(text: Text, repetitions: int) -> dict[str, float]:
    """Median wall milliseconds of a training step with each, in turn: what else the machine does meets both."""
    models = {name: LanguageModel() for name in MADE}
    optimizers = {name: make(models[name]) for name, make in MADE.items()}
    times = {name: [] for name in MADE}
    generator = torch.Generator().manual_seed(0)
    for _ in range(repetitions + 5):
        batch = drawn(text.known, BATCH, generator)
        for name in MADE:
            start = time.perf_counter()
            advance(models[name], optimizers[name], batch)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t[5:]) for name, t in times.items()}


def sweep(name: str, steps: int, text: Text) -> list[Run]:
    """The best rate's run of each seed. The best has the lowest mean of its last five tests."""
    tried = []
    for rate in RATES[name]:
        tried.append(run := train(name, rate, SEEDS[0], steps, text))
        reached = ", ".join(f"{run.steps_to(t):.0f}" for t in TARGETS)
        print(f"{name} {rate:8g}: loss {run.losses[-1]:.4f}, steps to {TARGETS}: {reached}", flush=True)
    best = min(tried, key=lambda run: sum(run.losses[-5:]) if all(map(math.isfinite, run.losses)) else math.inf)
    return [best, *(train(name, best.rate, seed, steps, text) for seed in SEEDS[1:])]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    if steps < EVERY:
        raise SystemExit(f"{steps} steps; expected at least {EVERY}, after which comes the first test")
    torch.set_num_threads(1)  # matrices this small are not worth sharing, and times are steadier
    text = Text()
    best = {name: sweep(name, steps, text) for name in MADE}
    ms = ms_per_step(text, min(steps, 100))
    print(f"\nseeds {SEEDS}, each optimizer's best rate: steps, and seconds of training, to a test loss")
    for name, runs in best.items():
        print(f"{name} at {runs[0].rate:g}, {ms[name]:.1f} ms a step")
        for target in TARGETS:
            taken = [run.steps_to(target) for run in runs]
            print(f"  {target}: " + ", ".join(f"{n:.0f} ({n * ms[name] / 1e3:.1f} s)" for n in taken))
        print("  at the end: " + ", ".join(f"{run.losses[-1]:.4f}" for run in runs))
    if len(sys.argv) > 2:
        at = range(EVERY, steps + 1, EVERY)
        drawing = (("AdamW", "second", "--"), ("MuonW", "ours", "-"))
        lines = [
            (f"{name}, rate {run.rate:g}" if i == 0 else "", ink, style, at, run.losses)
            for name, ink, style in drawing
            for i, run in enumerate(best[name])
        ]
        draw_losses(sys.argv[2], lines, highest=2.7)


if __name__ == "__main__":
    main()
