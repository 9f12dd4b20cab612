"""The ladder of attention: its rungs interpreted against standard attention, what they leave out, what they compile to."""

import itertools

import pytest
import torch
from where import DEVICE, printed

from weft import registry
from weft.course.ladders import attention as ladder
from weft.definition import Declined
from weft.operators.attention.reference import reference

SIZES = (
    (1, 1, 2, 2, 70, 70),
    (5, 1, 4, 2, 33, 100),
    (1, 1, 2, 1, 65, 7),
    (1, 1, 1, 1, 1, 40),
)  # the third: rows see nothing
RUNGS = {made.rung: made for made in registry.get("attention").implementations.values() if made.rung is not None}


def qkv(b, _, h, g, s, t, d=16, dtype=torch.float16):
    made = torch.Generator(DEVICE).manual_seed(s + t)
    return (torch.randn(b, n, r, d, generator=made, device=DEVICE, dtype=torch.float32).to(dtype)
            for n, r in ((h, s), (g, t), (g, t)))  # fmt: skip


@pytest.mark.share(2)
@pytest.mark.device
@pytest.mark.parametrize("number", RUNGS)
def test_a_rung_is_standard_attention(number):
    if number == 7 and DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA needs sm_90")
    for sizes, causal in itertools.product(SIZES, (False, True)):
        q, k, v = qkv(*sizes)
        o = RUNGS[number].function(q, k, v, causal=causal, scale=0.4)
        torch.testing.assert_close(o, reference(q, k, v, causal=causal, scale=0.4), rtol=4e-3, atol=2e-3)
        assert o.isfinite().all()


def test_the_rungs_stand_in_the_registry_in_order():
    assert list(RUNGS) == list(ladder.RUNGS) == list(range(1, 8))
    assert all(made.idea and made.directions == ("forward",) for made in RUNGS.values())


@pytest.mark.parametrize(
    ("number", "more", "words"),
    [
        (2, {"softcap": 3.0}, "causal and scale alone, not softcap"),
        (3, {"return_lse": True}, "not return_lse"),
        (1, {"sinks": torch.zeros(3, device=DEVICE)}, "not sinks"),
        (4, {"scale": -1.0}, "it must be positive"),
        (5, {"d": 24}, "head dims 24 and 24"),
        (6, {"transposed": True}, "contiguous"),
    ],
)
def test_rungs_decline_what_they_leave_out(number, more, words):
    q, k, v = (t.transpose(1, 2) if more.get("transposed") else t for t in qkv(1, 1, 3, 3, 5, 5, more.pop("d", 16)))
    more.pop("transposed", None)
    with pytest.raises(Declined, match=words):
        RUNGS[number].function(q, k, v, **more)


COMPILED = """
import torch
from weft.course.ladders import attention as ladder
from weft.operators.launch import compiling_for
with compiling_for(90, lambda name, cubin, shared, threads, language: print(shared)):
    for number in (4, 5):
        q, k, v = (torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
        ladder.rung(number)(q, k, v, causal=True)
"""


@pytest.mark.long
def test_the_pipelined_rung_holds_more_tiles_in_shared_memory():
    one, three = (int(n) for n in printed("-c", COMPILED).split())
    tile = 64 * 64 * 2
    assert one <= 3 * tile and three >= one + 2 * tile
