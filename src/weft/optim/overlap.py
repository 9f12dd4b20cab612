"""Steps within backward: a bucket of parameters is updated as soon as its gradients are there, which are then freed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from weft.optim.optimizer import OneLaunch


class Overlap:
    """Hooks that step an optimizer during backward, until :meth:`remove`.

    Every backward is then a step: no gradients are accumulated over several. ``step()`` is still to be called after each; it
    updates what is left: all parameters at the first time, those whose bucket was not complete, and those that PyTorch steps
    (on a CPU all). ``zero_grad()`` is too: only gradients that were stepped in backward are freed. Learning rates are those at
    the time of backward.

    Args:
        optimizer: of ours, without ``max_norm`` and ``skip_nonfinite``, which need all gradients.
        bucket_mib: gradients that are waited for, MiB; each bucket is one launch.

    Raises:
        ValueError: an optimizer that needs all gradients at once, a bucket of less than nothing.
    """

    def __init__(self, optimizer: OneLaunch, bucket_mib: float = 32.0):
        if optimizer.max_norm is not None or optimizer.skip_nonfinite:
            raise ValueError(
                "max_norm and skip_nonfinite need all gradients at once: they do not go with steps in backward"
            )
        if isinstance(bucket_mib, bool) or not isinstance(bucket_mib, (int, float)) or not bucket_mib >= 0:
            raise ValueError(
                f"overlap_with_backward: argument 'bucket_mib' is {bucket_mib!r:.40}; expected MiB, 0 or more"
            )
        self.optimizer = optimizer
        self.bucket_of: dict[int, list[Tensor]] = {}
        self.waiting: dict[int, int] = {}  # bucket → gradients that are not there yet
        bucket: list[Tensor] = []
        filled = 0
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for p in reversed(params):  # in about the order that gradients come
            bucket.append(p)
            self.bucket_of[id(p)] = bucket
            filled += p.numel() * p.element_size()
            if filled >= bucket_mib * 2**20:
                bucket, filled = [], 0
        self._start_over()
        self.handles: list[Any] = [p.register_post_accumulate_grad_hook(self._arrived) for p in params]
        self.handles.append(optimizer.register_step_pre_hook(self._refuse_scale))
        self.handles.append(optimizer.register_step_post_hook(lambda *_: self._start_over()))

    def _start_over(self) -> None:
        self.waiting = {id(bucket): len(bucket) for bucket in self.bucket_of.values()}

    def _arrived(self, p: Tensor) -> None:
        bucket = self.bucket_of[id(p)]
        self.waiting[id(bucket)] -= 1
        if self.waiting[id(bucket)] == 0:
            self.optimizer.step_some(bucket)

    def _refuse_scale(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("a gradient scaler needs all gradients at once: it does not go with steps in backward")

    def remove(self) -> None:
        """From now on only ``step()`` steps."""
        for handle in self.handles:
            handle.remove()
