"""How a number of things is written."""


def count(number: float, noun: str) -> str:
    """``1 GPU``, ``1,200 GPUs``, ``0.5 GPUs``."""
    whole = int(number) if number == int(number) else number
    return f"{whole:,} {noun}" + ("" if whole == 1 else "s")
