"""A ``torch.nn.Module`` as an ONNX file, and the proof that the file computes the same at other shapes.

Run-times compared: docs/notes/learn/inference.en.md.
"""

import contextlib
import inspect
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = "pip install 'weft[gpu,export]'"
# largest difference to PyTorch's eager result, relative to the largest number in it
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass
class Check:
    """One run of the file: the inputs' shapes, and the largest error relative to the largest number of the results."""

    shapes: list[list[int]]
    error: float


@dataclass
class Exported:
    """``inputs`` maps each name to its shape: numbers are fixed, names are dynamic, the same where sizes must be."""

    path: str
    mib: float
    opset: int
    inputs: dict[str, list[int | str]]
    checks: list[Check]


def to_onnx(
    module: Any,
    inputs: Sequence[Any],
    others: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    check_at: Sequence[Any] = (),
) -> Exported:
    """Exports a module and runs the file with ONNX Runtime on both examples, compared with PyTorch.

    Args:
        module: exported as it is in ``eval()``; its training mode is put back afterwards.
        inputs: the tensors of one call, all on the CPU.
        others: of another call. A dimension that differs between the two is dynamic (batch, length), all others are fixed.
        path: the file; it is written whole or not at all.
        check_at: more examples to check.

    Raises:
        ModuleNotFoundError: a package is missing; the message has the install line.
        ValueError: the examples do not match, the model fixes a dynamic dimension, an operator has no ONNX form, or
            the file computes something else than PyTorch.
    """
    torch, runtime = packages()
    _check_examples(torch, inputs, others, "others")
    for example in check_at:
        _check_examples(torch, inputs, example, "check_at")
    dynamic = tuple(
        {i: torch.export.Dim.DYNAMIC for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m}
        for a, b in zip(inputs, others, strict=True)
    )
    path = Path(path)
    with evaluated(module), torch.no_grad(), quiet(), tempfile.TemporaryDirectory(dir=_folder(path)) as folder:
        made = Path(folder) / path.name
        try:
            program = torch.onnx.export(
                module, tuple(inputs), dynamo=True, dynamic_shapes=_as_arguments(module, inputs, dynamic), verbose=False
            )
            program.save(str(made))
        except Exception as error:
            raise ValueError(f"the model cannot be exported: {_reason(error)}") from error
        _name_dimensions(made)
        session = runtime.InferenceSession(str(made), providers=["CPUExecutionProvider"])
        found = {i.name: list(i.shape) for i in session.get_inputs()}
        for (name, shape), dims in zip(found.items(), dynamic, strict=True):
            for d in dims:
                if isinstance(shape[d], int):
                    raise ValueError(
                        f"dimension {d} of '{name}' became fixed at {shape[d]}; the model depends on its size"
                    )
        checks = [_run(torch, session, module, example) for example in (inputs, others, *check_at)]
        size = sum(f.stat().st_size for f in Path(folder).iterdir()) / 2**20
        for file in Path(folder).iterdir():
            os.replace(file, path.with_name(file.name))
    return Exported(str(path), size, int(program.model.opset_imports[""]), found, checks)


def packages() -> tuple[Any, Any]:
    try:
        import onnx  # noqa: F401, what torch.onnx writes with
        import onnxruntime
        import onnxscript  # noqa: F401
        import torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"export needs {missing.name}: {INSTALL}", name=missing.name) from missing
    return torch, onnxruntime


def _check_examples(torch: Any, inputs: Sequence[Any], others: Sequence[Any], name: str) -> None:
    for which, example in (("inputs", inputs), (name, others)):
        for i, t in enumerate(example):
            if not isinstance(t, torch.Tensor) or t.device.type != "cpu" or not t.ndim or not t.numel():
                raise ValueError(
                    f"{which}[{i}] is {str(t)[:40]!r}; expected a tensor on the CPU with elements and a dimension"
                )
    kinds = [[(t.ndim, t.dtype) for t in example] for example in (inputs, others)]
    if not inputs or kinds[0] != kinds[1]:
        raise ValueError(f"{name} has (dimensions, dtype) {kinds[1]}; expected those of inputs: {kinds[0]}")


def _as_arguments(module: Any, inputs: Sequence[Any], dynamic: tuple[dict[int, Any], ...]) -> Any:
    """The dynamic dimensions in the form of ``forward``'s arguments: a tuple for ``*args`` counts as one argument."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    return dynamic if at is None else (*dynamic[:at], dynamic[at:])


USUAL = {2: ("batch", "length"), 3: ("batch", "length"), 4: ("batch", "channels", "height", "width")}  # by dimensions


def _name_dimensions(path: Path) -> None:
    """Names a file's dynamic dimensions by their places in the inputs; the exporter calls them s77, s27."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    graph, names = model.graph, dict[str, str]()
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        for d, dim in enumerate(dims):
            usual = USUAL.get(len(dims), ("batch",))[d : d + 1]
            free = usual and usual[0] not in names.values()
            if dim.dim_param:
                names.setdefault(dim.dim_param, usual[0] if free else f"{value.name}_{d}")
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:  # or an expression of several
                dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), dim.dim_param)
    onnx.save(model, str(path))


@contextlib.contextmanager
def evaluated(module: Any) -> Iterator[None]:
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, was in training.items():
            m.training = was


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's own warnings: what is wrong is checked here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")
    return path.parent


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:600] or type(error).__name__


def _run(torch: Any, session: Any, module: Any, example: Sequence[Any]) -> Check:
    names = [i.name for i in session.get_inputs()]
    shapes = [list(t.shape) for t in example]
    expected = [t for t in torch.utils._pytree.tree_leaves(module(*example)) if isinstance(t, torch.Tensor)]
    try:
        found = session.run(None, dict(zip(names, (t.numpy() for t in example), strict=True)))
    except Exception as error:
        raise ValueError(f"ONNX Runtime fails at shapes {shapes}: {_reason(error)}") from error
    worst = 0.0
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        got = torch.from_numpy(b)
        if got.shape != a.shape:
            raise ValueError(f"at shapes {shapes} result {i} has shape {list(got.shape)}; PyTorch's is {list(a.shape)}")
        off = (
            float((got.double() - a.double()).abs().max() / a.double().abs().max().clamp_min(1e-30))
            if a.numel()
            else 0.0
        )
        allowed = TOLERANCE.get(str(a.dtype).removeprefix("torch."), 0.0)
        if not off <= allowed:  # NaN too
            raise ValueError(
                f"at shapes {shapes} result {i} differs from PyTorch's by {off:.2g} of its largest; allowed {allowed:g}"
            )
        worst = max(worst, off)
    return Check(shapes, worst)
