"""Coefficients of quintic Newton–Schulz iterations: a step maps each singular value s to a·s + b·s³ + c·s⁵.

*classic*: (3.4445, −4.7750, 2.0315) at every step, chosen for a steep slope at 0; singular values end between about 0.7 and 1.2
and do not converge to 1 (Jordan et al. 2024, "Muon", https://kellerjordan.github.io/posts/muon/).

*polar-express*: for each step the quintic that is closest to 1, in the maximum, on the interval which the steps before leave,
from [10⁻³, 1] on (Amsel, Persson, Musco and Gower 2025, "The Polar Express: Optimal Matrix Sign Methods and Their Application
to the Muon Algorithm", arXiv 2505.16932, Algorithm 1 and section 4.4). As there, every polynomial but the last of the table is
shrunk by 1.01 in its argument and the matrix divided by 1.01 times its norm, so that rounding in bf16 does not carry singular
values out of the interval.
"""

from collections.abc import Sequence
from typing import Any

from weft.definition import UnknownName

Step = tuple[float, float, float]

CLASSIC: Step = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),  # Taylor's polynomial at 1, to which the optimal ones converge; for all steps from here on
)
MARGIN = 1.01
NAMES = ("classic", "polar-express")
MOST_STEPS = 99

Coefficients = str | Sequence[float] | Sequence[Sequence[float]]


def schedule(coefficients: Coefficients, steps: int) -> tuple[Step, ...]:
    """One triple (a, b, c) for each step. Raises ValueError for anything but a name, three numbers or three for each step."""
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"newton_schulz: argument 'steps' is {steps!r}; expected a whole number, 1 … {MOST_STEPS}")
    if isinstance(coefficients, str):
        if coefficients not in NAMES:
            raise UnknownName("coefficients of newton_schulz", coefficients, NAMES)
        if coefficients == "classic":
            return (CLASSIC,) * steps
        shrunk = tuple((a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in POLAR_EXPRESS[:-1])
        return (*shrunk, *POLAR_EXPRESS[-1:] * steps)[:steps]
    given = list(coefficients) if isinstance(coefficients, Sequence) else []
    if len(given) == 3 and all(map(_number, given)):
        return (_step(given),) * steps
    if len(given) == steps and all(isinstance(s, Sequence) and len(s) == 3 and all(map(_number, s)) for s in given):
        return tuple(_step(s) for s in given)
    raise ValueError(
        f"newton_schulz: argument 'coefficients' is {coefficients!r:.80}; expected {' or '.join(map(repr, NAMES))}, a "
        f"tuple of exactly 3 numbers (a, b, c), or {steps} of them, one for each step"
    )


def margin(coefficients: Coefficients) -> float:
    """What the norm is multiplied with before the matrix is divided by it."""
    return MARGIN if coefficients == "polar-express" else 1.0


def known(coefficients: Coefficients) -> bool:
    """Whether they are one of the named sets, whose growth in 16 bits has been studied."""
    return coefficients in NAMES or tuple(coefficients) == CLASSIC


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _step(values: Any) -> Step:
    a, b, c = map(float, values)
    return a, b, c
