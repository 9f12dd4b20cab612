"""A profile as a small JSON file, to keep, to edit, or to hand on where the trace itself must not go."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.cluster.files.atomic import written
from weft.cluster.files.text import TraceError, json_of
from weft.cluster.synthetic.arrivals import Arrivals
from weft.cluster.synthetic.distributions import LogNormal, Quantiles, Quantity
from weft.cluster.synthetic.profile import Profile, Request, Size, Tenant
from weft.definition import UnknownName


def save(path: str | Path, profile: Profile) -> None:
    """Writes the fields of :class:`Profile`; those with their default value are left out.

    Raises:
        ValueError: it already exists.
        OSError: it cannot be written.
    """
    lines = []
    for name, value in _plain(profile).items():
        if name in ("sizes", "tenants"):  # one line each
            rows = [f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in value.items()]
            lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    with written(path) as file:
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def load(path: str | Path) -> Profile:
    """The profile that a file holds.

    Raises:
        TraceError: no JSON, an unknown key (with the nearest one), a missing one, a value that cannot be.
    """
    try:
        return _of(Profile, json_of(Path(path)), "the profile")
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(of) for key, of in value.items()}
    if isinstance(value, tuple):
        return [_plain(of) for of in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for field in dataclasses.fields(value):
        of = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if of != default:
            found[field.name] = _plain(of)
    return found


# ---- reading ---------------------------------------------------------------------------------------------------------


def _of(cls: Any, value: Any, where: str) -> Any:
    """One of the profile's classes from a JSON object with its fields as keys."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in _object(value, where):
        if key not in fields:
            raise UnknownName(f"key of {where}", key, fields)
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no '{name}'; expected one")
    made = {}
    for key, of in value.items():
        read = NESTED.get((cls, key)) or PLAIN[fields[key].type]
        made[key] = read(of, f"{key} of {where}")
    return cls(**made)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {json.dumps(value)[:40]}; expected an object, {{…}}")
    return value


def _quantity(value: Any, where: str) -> Quantity:
    return _of(Quantiles if "probabilities" in _object(value, where) else LogNormal, value, where)


def _each(read: Callable[[Any, str], Any]) -> Callable[[Any, str], dict[str, Any]]:
    return lambda value, where: {name: read(of, f"'{name}' in {where}") for name, of in _object(value, where).items()}


def _list(read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def every(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {json.dumps(value)[:40]}; expected a list, […]")
        return tuple(read(of, f"item {k} of {where}") for k, of in enumerate(value, 1))

    return every


def _a(expected: str, *kinds: type) -> Callable[[Any, str], Any]:
    def plain(value: Any, where: str) -> Any:
        wrong = isinstance(value, bool) and bool not in kinds
        if wrong or not isinstance(value, kinds) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{where} is {json.dumps(value)[:40]}; expected {expected}")
        return value

    return plain


def _class(cls: Any) -> Callable[[Any, str], Any]:
    return lambda value, where: _of(cls, value, where)


NUMBER, WORD = _a("a number", int, float), _a("a word", str)
PLAIN: dict[Any, Callable[[Any, str], Any]] = {
    float: NUMBER,
    int: _a("a whole number", int),
    str: WORD,
    bool: _a("true or false", bool),
    tuple[float, ...]: _list(NUMBER),
    tuple[str, ...]: _list(WORD),
}
NESTED: dict[tuple[Any, str], Callable[[Any, str], Any]] = {
    (Profile, "arrivals"): _class(Arrivals),
    (Profile, "sizes"): _each(_class(Size)),
    (Profile, "tenants"): _each(_class(Tenant)),
    (Size, "requests"): _list(_class(Request)),
    (Size, "durations"): _quantity,
    (Size, "estimates"): _quantity,
    (Tenant, "sizes"): _each(NUMBER),
    (Tenant, "durations"): _each(_quantity),
}
