"""Triton's interpreter in half the time: what it does again at each call of a device function it does once, and what comes to
nothing it leaves out. Results are the same. Imported by ``conftest.py`` where kernels are interpreted."""

import dataclasses
import functools
import inspect

from triton.language.core import is_builtin
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


interpreter._LangPatchScope = Scope
interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtins
interpreter._get_np_dtype = numpy_dtype
# Whether integers overflow is computed, and then not asserted without ``debug``.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
