"""The Triton solutions of the course compile for a GPU, as well as they are interpreted: what a learner takes there runs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.learn import course

SOURCES = [str(e.folder / "exercise.py") for e in course.exercises() if e.kind == "triton"]
BLOCKS = {"BLOCK": 64, "ROWS": 16, "COLS": 32, **dict.fromkeys(("TM", "TN", "TK", "M", "N", "D"), 32)}


@pytest.mark.share(2)
def test_solutions_compile_for_a_gpu():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, __file__, *SOURCES], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split().count("compiled") >= 18


def kernels(path):
    """Name, kernel, and types of its arguments: pointers by name, floats by name, sizes and strides int32."""
    from triton.runtime.jit import JITFunction

    spec = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    float16 = "float16" in Path(path).read_text(encoding="utf-8")
    for name, fn in vars(module).items():
        if isinstance(fn, JITFunction) and name.endswith("_kernel"):
            pointer = "*fp16" if float16 else "*fp32"
            types = {a: "constexpr" if a in BLOCKS else pointer if a.endswith("_ptr") else "i32" for a in fn.arg_names}
            types |= dict.fromkeys({"a", "scale"} & set(fn.arg_names), "fp32")
            yield name, fn, types


if __name__ == "__main__":
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    for path in sys.argv[1:]:
        for name, fn, types in kernels(path):
            blocks = {(i,): BLOCKS[a] for i, a in enumerate(fn.arg_names) if a in BLOCKS}
            made = compile(ASTSource(fn, types, blocks), target=GPUTarget("cuda", 90, 32))
            sys.stdout.write(f"compiled {name}, {made.metadata.shared} bytes of shared memory\n")
