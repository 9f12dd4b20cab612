"""Addresses of many parameters' gradients in one call of a C function, ``addresses.c``.

Asked one by one in Python, four questions of each parameter are most of what a step of many small tensors costs. The function
is compiled, at the first step of all, by what compiles Triton's launchers, in a fifth of a second, and kept in Triton's cache.
What it asks is PyTorch's C interface, and one method of C++, for the gradient. Before it is used it is tried on tensors whose
answers are known. Where anything is missing, or ``WEFT_HOST=python`` is set, Python asks, and :func:`obstacle` says why.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from triton.runtime.build import compile_module_from_src

SOURCE = Path(__file__).with_name("addresses.c")
MISSING, THERE, ODD = 0, 1, 2  # what is known of a row: it has no gradient, it has one, Python is to look at it
FUNCTIONS = (  # in the order of the struct in the source
    "aoti_torch_is_defined",
    "aoti_torch_get_layout",
    "aoti_torch_get_dtype",
    "aoti_torch_is_contiguous",
    "aoti_torch_get_dim",
    "aoti_torch_get_strides",
    "aoti_torch_get_data_ptr",
    "_ZNK3c1010TensorImpl4gradEv",
    "aoti_torch_layout_strided",
)
WORD = ctypes.sizeof(ctypes.c_void_p)


class Unavailable(Exception):
    """Why Python asks."""


class Addresses:
    """Parameters of which all is asked at once.

    Args:
        params: tensors whose class is ``Tensor`` or ``Parameter`` itself.
        weights: their addresses.
        found: int64 [len(params)], where the gradients' addresses are written; 0 where there is none.

    Attributes:
        kinds: uint8 [len(params)], what was known of each row when it was last read.
    """

    def __init__(self, params: Sequence[Tensor], weights: Sequence[int], found: np.ndarray):
        module, offset = _library()
        self.params = list(params)  # alive as long as their objects are read
        self.handles = np.array([id(p) + offset for p in params], np.int64)
        self.weights = np.array(weights, np.int64)
        self.found = found
        self.kinds = np.empty(len(params), np.uint8)
        arrays = self.handles, self.weights, self.found, self.kinds
        self._ask, self._given = module.ask, (len(params), *(a.ctypes.data for a in arrays))

    def read(self) -> bool:
        """Writes addresses and kinds. Returns whether all rows are there."""
        return bool(self._ask(*self._given) & ~(1 << THERE) == 0)


def takes(params: Sequence[Tensor]) -> bool:
    """Whether these parameters can be asked at once: a class of a user's own may answer otherwise than PyTorch does."""
    return {type(p) for p in params} <= {Tensor, torch.nn.Parameter} and not obstacle()


@functools.cache
def obstacle() -> str:
    """Why Python asks each parameter by itself (an empty string when C asks all of them)."""
    try:
        _library()
    except Unavailable as why:
        return str(why)
    return ""


@functools.cache
def _library() -> tuple[ModuleType, int]:
    """The compiled module, and how far into a tensor's Python object PyTorch's own tensor lies."""
    if os.environ.get("WEFT_HOST") == "python":
        raise Unavailable("WEFT_HOST=python is set")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("this Python runs threads side by side, and nothing would hold a gradient while it is read")
    headers = {sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY")}
    if not any(Path(folder, "Python.h").exists() for folder in headers):
        raise Unavailable(f"Python.h is not in {' or '.join(headers)}, so nothing is compiled for this Python")
    offset = _offset()
    try:
        symbols = ctypes.PyDLL(torch._C.__file__)  # finds those of the libraries that it needs
        functions = [ctypes.cast(symbols[name], ctypes.c_void_p).value for name in FUNCTIONS]
    except (OSError, AttributeError) as missing:
        raise Unavailable(f"PyTorch {torch.__version__} lacks what is asked of it: {missing}") from missing
    try:
        module = compile_module_from_src(SOURCE.read_text(), "weft_addresses")
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as failure:
        raise Unavailable(f"{SOURCE.name} was not compiled: {failure}") from failure
    module.use(*functions)
    _try_out(module, offset)
    return module, offset


def _offset() -> int:
    """Bytes from a tensor's Python object to its ``at::Tensor``, which is a pointer that ``_cdata`` tells."""
    found: set[int] = set()
    for t in (torch.empty(2, device="cpu"), torch.nn.Parameter(torch.empty(3, device="cpu"))):
        words = (ctypes.c_size_t * (Tensor.__basicsize__ // WORD)).from_address(id(t))
        found.add(next((i * WORD for i, word in enumerate(words) if word == t._cdata), 0))
    if len(found) > 1 or found == {0}:
        raise Unavailable(f"PyTorch {torch.__version__} keeps a tensor in its Python object in a way that is not known")
    return found.pop()


def _try_out(module: ModuleType, offset: int) -> None:
    """Raises Unavailable unless tensors of every kind are answered for as they should be."""
    samples = [torch.nn.Parameter(torch.zeros(4, 3, device="cpu")) for _ in range(5)]
    ones = torch.ones(4, 3, device="cpu")
    grads = ones, None, ones.to_sparse(), torch.ones(3, 4, device="cpu").t(), ones
    for p, g in zip(samples, grads, strict=True):
        p.grad = g
    lie = np.array([p.data_ptr() for p in samples], np.int64)
    lie[4] += 4  # one that has moved
    handles = np.array([id(p) + offset for p in samples], np.int64)
    found, kinds = np.full(5, -1, np.int64), np.full(5, 9, np.uint8)
    seen = module.ask(5, *(a.ctypes.data for a in (handles, lie, found, kinds)))
    wanted = [ones.data_ptr(), 0, 0, 0, 0]
    if (seen, kinds.tolist(), found.tolist()) != (7, [THERE, MISSING, ODD, ODD, ODD], wanted):
        raise Unavailable(
            f"PyTorch {torch.__version__} answers {kinds.tolist()}, {found.tolist()} in C; in Python {wanted}"
        )
