"""What a Triton exercise computes in PyTorch, outside of its kernels.

A wrapper that does the work itself, and has a kernel copy the result, has written no kernel. Tensors may be made, viewed
and copied there.
"""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ALLOWED = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
    ),
    *("ones_like", "full", "full_like", "new_full", "fill_", "zero_", "arange", "lift_fresh", "set_", "resize_"),
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
    ),
    *("slice", "select", "as_strided", "detach", "alias", "unbind", "split", "unfold"),
    *("clone", "copy_", "_to_copy", "contiguous", "_local_scalar_dense"),
}


class Computed(TorchDispatchMode):
    """Collects the ``names`` of PyTorch's operators that computed something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else PyTorch imports all of its compiler, in each forked process anew, to leave this mode out of graphs."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ALLOWED and name not in self.names:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
