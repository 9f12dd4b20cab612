"""The CUDA context of a thread, for calls of the driver that come before any of CUDA's runtime."""

from __future__ import annotations

import torch

from weft.operators.cuda import CudaError, _bindings


def make_current() -> None:
    """Makes the device's primary context this thread's where it has none: autograd's threads begin so.

    Raises:
        CudaError: what the driver says.
    """
    driver = _bindings()[0]
    if torch.cuda.is_available() and not int(driver.cuCtxGetCurrent()[1]):
        status, context = driver.cuDevicePrimaryCtxRetain(torch.cuda.current_device())
        if int(status) or int(driver.cuCtxSetCurrent(context)[0]):
            raise CudaError(f"no CUDA context in this thread: {status.name}")
