"""Run by test_loop.py in a process without Triton's interpreter, where weft's functions are what a user has on a CPU: prints
{case: [...]} as JSON. Argument: a folder."""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from weft.train.loop import Run, train
from weft.train.settings import CnnSettings, GptSettings

torch.set_num_threads(1)
root = Path(sys.argv[1])
text = root / "text"
text.mkdir()
for i in range(25):
    (text / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (5 + i))
small = GptSettings(text=str(text), layers=2, width=32, heads=4, kv_heads=2, length=32, batch=8, steps=8, lr=3e-3)
found = {}


def gpt(**changed):
    return dataclasses.replace(small, **changed)


for seed, amp in ((0, "none"), (1, "none"), (2, "none"), (0, "bf16")):
    losses = [train(gpt(operators=o, seed=seed, amp=amp), save=False).loss for o in ("weft", "torch")]
    found[f"operators {seed} {amp}"] = losses

found["fp8"] = [train(gpt(fp8=fp8, steps=20, amp="bf16"), save=False).loss for fp8 in (True, False)]

for optimizer in ("weft-adamw", "weft-adamw-8bit"):
    whole = gpt(optimizer=optimizer, steps=4, out=str(root / optimizer / "whole"))
    part = gpt(optimizer=optimizer, steps=4, checkpoint_every=2, out=str(root / optimizer / "part"))
    one, _ = train(whole), train(part)
    for file in (root / optimizer / "part" / "checkpoints").glob("*4/weft.json"):
        file.unlink()
    part.resume = True
    rest = train(part)
    held = []
    for settings in (whole, part):
        run = Run(settings, torch.device("cpu"), False, None)
        run.resumed()
        state = run.optimizer.state_dict()["state"]
        held.append([*run.model.state_dict().values(), *(v for of in state.values() for v in of.values())])
    same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*held, strict=True))
    found[f"resume {optimizer}"] = [one.loss[2:] == rest.loss and len(rest.loss) == 2, same, len(held[0])]

digits = train(CnnSettings(out=str(root / "digits"), epochs=12))
found["digits"] = [digits.accuracy, digits.seconds]
found["interpreted"] = ["triton.runtime.interpreter" in sys.modules]
sys.stdout.write(json.dumps(found))
