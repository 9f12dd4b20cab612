"""How a number of things is written."""


def count(number: float, noun: str) -> str:
    """``1 GPU``, ``1,200 GPUs``, ``0.5 GPUs``."""
    whole = int(number) if number == int(number) else number
    return f"{whole:,} {noun}" + ("" if whole == 1 else "s")


def period(seconds: float) -> str:
    """``108 d 21 h``, ``2 h 5 min``, ``40 s``: the two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts: list[str] = []
    left = round(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size and len(parts) < 2:
            parts.append(f"{left // size:,} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts)
