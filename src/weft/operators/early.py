"""Lets the next kernel of a stream begin before this one ends (programmatic dependent launch, CUDA programming guide).

The next kernel does what needs no result of this one, such as fetching weights, and then waits until this one has ended. Kernels
that were not launched for it begin as always. So a kernel of few blocks that commonly runs before a product calls this first;
``Plan`` says with ``EARLY`` whether the architecture has the instruction.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
