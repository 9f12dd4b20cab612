"""Runs of weft.train with the learner's own kernels where the earlier exercises are done, else with the course's."""

import importlib.util
import keyword
from pathlib import Path

from torch.nn import functional as F

from weft.train.loop import train
from weft.train.settings import GptSettings

COURSE = Path(__file__).parent.parent


def earlier(exercise, name, number):
    mine = Path(exercise.__file__).parent / f"{number:02}_{name}.py"
    done = mine.is_file() and "# I AM NOT DONE" not in mine.read_text(encoding="utf-8")
    path = mine if done else COURSE / name / "exercise.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(exercise, seed, steps, layers):
    settings = GptSettings(
        text=keyword.__file__, steps=steps, layers=layers, batch=2, length=32, width=32, heads=2, kv_heads=1,
        lr=1e-2, seed=seed, device="cpu", operators="torch", optimizer="adamw", out="",
    )  # fmt: skip
    attention = earlier(exercise, "backward", 6).attention
    sdpa = earlier(exercise, "drop_in", 7).make_sdpa(attention)
    original = F.scaled_dot_product_attention
    calls = 0

    def counted(query, *args, **kwargs):
        nonlocal calls
        calls += query.requires_grad  # validation runs it, too
        return sdpa(query, *args, **kwargs)

    def failing(*args, **kwargs):
        raise ArithmeticError

    plain = train(settings, save=False).loss
    mine = exercise.losses(settings, counted)
    theirs = exercise.losses(settings)
    try:
        exercise.losses(settings, failing)
    except ArithmeticError:
        pass
    after_error = F.scaled_dot_product_attention is original
    F.scaled_dot_product_attention = original
    return plain, theirs, mine, calls, after_error
