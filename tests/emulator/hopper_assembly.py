"""The assembly of Hopper's main loop, and what every kernel made of it must show there."""

import re

from sass import sass

from weft.operators.hopper import gemm


def assembly(expression: str) -> str:
    return sass(gemm.SOURCE, expression)


def check_inner_loop(text: str, product: str, fetches: int, streamed: bool = False) -> None:
    """Products run in pairs of stages, not one after another; neither sums nor descriptors pass through other registers."""
    found = re.findall(r"\w*GMMA\S*|WARPGROUP\.DEPBAR.*?;", text)
    products, waits = [f for f in found if "GMMA" in f], [f for f in found if "DEPBAR" in f]
    assert products and set(products) == {product} and len(products) % 4 == 0
    assert len(re.findall(r"GMMA.*gsb0", text)) == len(products) // 4, "ptxas makes products wait for each other"
    assert sorted(set(waits)) == ["WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"]
    assert waits.count("WARPGROUP.DEPBAR.LE gsb0, 0x0 ;") == 1 and len(waits) == len(products) // 4 + 1
    inner = text[text.index(product) : text.rindex(product)]
    assert "R2UR" not in inner, "descriptors are made in registers of threads"
    assert len(re.findall(r"\bMOV|IMAD\.MOV", inner)) < 20, "sums are moved"
    assert text.count("MEMBAR.ALL.GPU") == streamed, "a stage is released behind all stores of the block"
    producer = text[text.rindex("ELECT") :]
    assert "BRA.U.ANY" not in producer, "the producer's operands are sought lane by lane"
    assert producer.count("UTMALDG") and producer.count("UTMALDG") % fetches == 0
