"""The base of weft's optimizers: PyTorch's ``Optimizer`` over the one-launch engine of ``weft.operators.optimizer``."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import optimizer as pytorch

from weft.operators.optimizer import kernels
from weft.operators.optimizer.rule import Options, Rule
from weft.optim import clipping, codes, saved, wide
from weft.optim.codes import local
from weft.optim.options import EVERY, OF_STEPS, check_flags, check_options, each_once, tensor_of
from weft.optim.overlap import Overlap
from weft.optim.part import Part, takes
from weft.optim.watched import Changes, Parameters, Seen, watch

PARAMS = itemgetter("params")


class OneLaunch(torch.optim.Optimizer):
    """An optimizer that updates all parameters in one launch. A subclass brings a rule and, for parameters that the engine
    does not take, the same in PyTorch; see ``operators/optimizer/README.md``.

    Args:
        params: as PyTorch's optimizers take them: tensors, named tensors, or groups with options of their own.
        defaults: the optimizer's options; each may be given for a group too.
        max_norm: before the step, gradients are scaled down to this 2-norm of all of them together (None: they are not).
            Takes one more launch, which reads the gradients; ``grad_norm`` is the norm before.
        skip_nonfinite: a step with a gradient that is not finite changes nothing but ``skipped_steps``; decided on the
            device, in the same launch as the norm.
        zero_grads: the step sets gradients to 0 as it reads them, in place of a ``zero_grad(set_to_none=False)`` after it.

    Options of a group, besides the optimizer's own (here their defaults, by keyword):
        maximize, differentiable: as in PyTorch; differentiable steps are PyTorch's.
        foreach, fused, capturable: taken for compatibility: there is one way here, which is fused and capturable always.
            ``capturable`` and ``fused`` still decide, as in PyTorch, whether ``state_dict`` has steps on the device.
        rounding: of bf16 weights: ``nearest``; ``stochastic`` (up or down at random so that the expectation is right, from
            ``seed``); ``split`` (16 more bits of each weight are kept as the state ``lower_bits``: the two are an fp32 weight).
        state_dtype: of states that have the weight's shape: None for the weight's own, as in PyTorch, or ``torch.float32``.

    Raises:
        ValueError: options out of range, a parameter that is there twice.
        TypeError: an unknown option, a switch that is neither True nor False.
    """

    rule: ClassVar[Rule]
    plain: ClassVar[Callable[..., None]]
    may_lack: ClassVar[tuple[str, ...]] = ()  # what a state may be loaded without
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and skipping to the step

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        zero_grads: bool = False,
        **options: Any,
    ) -> None:
        if unknown := [name for name in options if name not in EVERY]:
            known = ", ".join((*OF_STEPS, *{**EVERY, **defaults}))
            raise TypeError(f"{type(self).__name__}: unknown option '{unknown[0]}' (there are: {known})")
        if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0):
            raise ValueError(f"Invalid max_norm: {max_norm!r:.40}; expected a number above 0, or None")
        check_flags({"skip_nonfinite": skip_nonfinite, "zero_grads": zero_grads})
        self.max_norm, self.skip_nonfinite, self.zero_grads = max_norm, skip_nonfinite, zero_grads
        self._reset()
        super().__init__(params, {**EVERY, **defaults, **options})

    def _reset(self) -> None:
        self._changes = Changes()
        self._changes.seen = True
        self._parts: list[Part] = []
        self._replayed: list[Part] = []  # of before, which captured graphs read
        self._plain: list[tuple[int, Tensor]] = []
        self._lists: list[Seen] = []  # of the groups' parameters
        self._watched: Any = None
        self._rest: list[Tensor] = []  # parameters that have had no gradient yet
        self._values: dict[int, tuple[list[type], list[Any]]] = {}  # of options without tensors
        self._forms: dict[int, Any] = {}
        self._formats = codes.Formats()
        self._controls: dict[torch.device, Tensor] = {}

    # ---- groups and options ------------------------------------------------------------------------------------------

    def check(self, options: Options) -> None:
        """Raises ValueError for a group's options that are out of range, TypeError for switches that are not bools;
        subclasses add theirs."""
        check_options(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if misplaced := [name for name in OF_STEPS if name in param_group]:
            raise ValueError(
                f"{misplaced[0]} is given for one group; expected it for the optimizer: a step has one for all"
            )
        self.check({**self.defaults, **param_group})
        param_group = each_once(param_group)
        how = param_group.get("rounding", self.defaults["rounding"])
        if how != "nearest" and isinstance(param_group["params"], list):
            for p in map(tensor_of, param_group["params"]):
                if isinstance(p, Tensor) and p.dtype != torch.bfloat16:
                    raise ValueError(f"rounding='{how}' is for torch.bfloat16 weights; a parameter is {p.dtype}")
        super().add_param_group(param_group)
        self.param_groups[-1]["params"] = Parameters(self.param_groups[-1]["params"])
        self._changes.seen = True

    # ---- step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            RuntimeError: sparse gradients; a first step within a CUDA graph capture.
        """
        if torch.compiler.is_dynamo_compiling():
            return _untraced_step(self, closure)
        if type(self).step is OneLaunch.step and observed(self):  # a subclass's own is wrapped by PyTorch
            return _observed_step(self) if closure is None else _observed_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # else PyTorch wraps it at the first instance: see observed()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.defaults["differentiable"])  # without a context manager's microseconds
        try:
            self._advance()
        finally:
            torch._C._set_grad_enabled(before)
        return loss

    def _advance(self) -> None:
        changed = [g for g in range(len(self.param_groups)) if self._options_changed(g)]
        if self._changes.seen or not self._still_right():
            self._prepare()
        active = [part.collect() for part in self._parts]
        if any(part.outdated for part in self._parts):
            self._prepare()
            active = [part.collect() for part in self._parts]
        plain = [(g, p) for g, p in self._plain if p.grad is not None]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if (self.max_norm is not None or self.skip_nonfinite) and any(part.sharded for part in self._parts):
            raise RuntimeError(
                "max_norm and skip_nonfinite look at this rank's gradients alone, and a parameter is sharded over several; "
                "use torch.nn.utils.clip_grad_norm_, which knows DTensors"
            )
        alone = len(self._parts) == 1 and not plain
        if (self.max_norm is not None or self.skip_nonfinite) and not alone:
            found = clipping.measure(self, plain, scale, found)
        for part, rows in zip(self._parts, active, strict=True):
            self._set_numbers(part, changed)
            part.announce(rows, self.zero_grads)
            part.table.launch(
                rows,
                scale=on(part.device, scale),
                found=on(part.device, found),
                max_norm=self.max_norm,
                guarded=self.skip_nonfinite,
                measured=not alone,
                zeroed=self.zero_grads,
            )
            if self.zero_grads:
                part.zero_copied()
        if plain:
            self._step_plain(plain, scale, found)

    def overlap_with_backward(self, bucket_mib: float = 32.0) -> Overlap:
        """From now on steps within backward; see :class:`weft.optim.overlap.Overlap`, which is returned."""
        return Overlap(self, bucket_mib)

    @torch.no_grad()
    def step_some(self, params: list[Tensor]) -> None:
        """Steps some parameters now and drops their gradients, if all is prepared; what is not is left to :meth:`step`."""
        changed = [g for g in range(len(self.param_groups)) if self._options_changed(g)]
        right = not self._changes.seen and self._still_right()
        for part in self._parts if right else ():
            rows = part.collect(params)
            if part.outdated:
                self._changes.seen = True
                return
            self._set_numbers(part, changed)
            part.announce(rows, zeroed=False)
            part.table.launch(rows, zeroed=False)
            for row in range(len(part.params)) if rows is None else rows.nonzero()[0]:
                part.params[row].grad = None

    def _set_numbers(self, part: Part, changed: list[int]) -> None:
        for group in range(len(self.param_groups)) if part.new else changed:
            options = self.param_groups[group]
            part.table.set_group(group, options, -1.0 if options["maximize"] else 1.0)
        part.new = False

    def _still_right(self) -> bool:
        """Whether the groups' parameters and the states are those that the tables were made of (where weights lie is found
        out with their gradients)."""
        lists = list(map(PARAMS, self.param_groups))
        same = len(lists) == len(self._lists) and all(
            [seen.still(x) for seen, x in zip(self._lists, lists, strict=True)]
        )
        return same and self.state is self._watched and all([p.grad is None for p in self._rest])

    def _options_changed(self, index: int) -> bool:
        """Whether a group's options differ from those of the last step (of tensors nobody knows without looking)."""
        group = self.param_groups[index]
        values = [v for name, v in group.items() if name != "params"]
        kinds = list(map(type, values))  # also so that no number is compared with a tensor, which would wait for it
        if self._values.get(index) == (kinds, values):
            return False
        if any(isinstance(v, Tensor) for v in values):
            self._values.pop(index, None)
        else:
            self._values[index] = kinds, values
        rule, options = self.rule, ("rounding", "state_dtype", "differentiable")
        form = rule.variant(group), rule.states(group), rule.counted(group), *(group[o] for o in options)
        form = *form, *(group.get(o) for o in codes.OPTIONS)
        if self._forms.get(index) != form:
            self._forms[index] = form
            self._changes.seen = True
        return True

    def _step_plain(self, plain: list[tuple[int, Tensor]], scale: Tensor | None, found: Tensor | None) -> None:
        """Parameters on the CPU and those that the engine does not take, by PyTorch's own functions."""
        if found is not None and float(found):
            if not self._parts:
                self._control(plain[0][1].device)[kernels.SKIPPED.value] += 1
            if self.zero_grads:  # else what is not finite stays, and every later step is skipped for it
                zero([p for _, p in plain])
            return
        factor = None if self.max_norm is None else self._control(plain[0][1].device)[kernels.FACTOR.value]
        for index, group in enumerate(self.param_groups):
            mine = [p for g, p in plain if g == index]
            if mine:
                grads = [clipping.ready(p, self, scale, factor) for p in mine]
                states = [self._state_of(p, group, engine=False) for p in mine]
                wide.step(type(self).plain, mine, grads, states, group)
                if self.zero_grads:
                    zero(mine)

    # ---- preparation -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Makes the tables of all that has been seen with a gradient, and the states that are not there yet."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() would make or move its state within a CUDA graph capture; call it once "
                "before, with the same parameters and gradients, and leave them in place"
            )
        self._replayed += [part for part in self._parts if part.table.captured]
        self._lists = [Seen(group["params"]) for group in self.param_groups]
        self._plain, self._rest = [], []
        rows: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if not takes(p, group):
                    self._plain.append((index, p))
                elif p.grad is None and not self.state.get(p):
                    self._rest.append(p)
                else:
                    self._state_of(p, group, engine=True)
                    rows.setdefault(local(p).device, []).append((index, p))
        self._parts = [Part(self.rule, r, self.param_groups, self.state, self._control(d)) for d, r in rows.items()]
        self.state = self._watched = watch(self.state, self._changes)

    def _control(self, device: torch.device) -> Tensor:
        if device not in self._controls:
            self._controls[device] = torch.zeros(kernels.CONTROLS, dtype=torch.float32, device=device)
        return self._controls[device]

    def _state_of(self, p: Tensor, group: dict[str, Any], *, engine: bool) -> dict[str, Any]:
        """A parameter's state, made where there is none and moved where a checkpoint has left it elsewhere."""
        self._formats.check(p, self.state[p], group)
        self._formats.note(p, group)
        return saved.complete(self.state[p], p, group, self.rule, engine)

    # ---- what users read ---------------------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite (waits for the device)."""
        return max((int(c[kernels.SKIPPED.value]) for c in self._controls.values()), default=0)

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients of the last step, unscaled and before clipping: one fp32 on the device.

        Raises:
            RuntimeError: it was not computed.
        """
        if (self.max_norm is None and not self.skip_nonfinite) or not self._controls:
            raise RuntimeError("grad_norm is computed by a step with max_norm or skip_nonfinite; there was none")
        return next(iter(self._controls.values()))[kernels.NORM.value].clone()

    # ---- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As PyTorch's: the state of ``torch.optim``'s optimizer of the same name, which can load it."""
        return saved.export(super().state_dict(), self._parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict`, or that of ``torch.optim``'s optimizer of the same name, has returned.

        Raises:
            ValueError: other groups, a state that lacks something (other than all), or one of another shape or dtype than it
                should be; moments in 8 bits, which ``torch_state_dict()`` of their optimizer gives in 32.
        """
        pairs: saved.Pairs = []

        def prepare(given: dict[str, Any]) -> dict[str, Any]:
            pairs.extend(saved.pairs_of(self, given))
            if "state_format" not in self.defaults:
                given = saved.without_codes(given)
            groups = [{**self.defaults, **group} for group in given["param_groups"]]
            kept = [saved.names_of(self.rule, group) for group in groups for _ in group["params"]]
            saved.check(pairs, kept, self.may_lack)
            return given

        saved.load(self, state_dict, prepare)
        saved.keep_dtypes(pairs, self.state, self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in OF_STEPS}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_changes" not in self.__dict__:
            self._reset()
        self._changes.seen = True
        for group in self.param_groups:
            group["params"] = Parameters(group["params"])
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for p in group["params"]:
                self._formats.note(p, group)  # what was loaded with the state


def observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step has hooks, or is to be seen in a profile."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or pytorch._global_optimizer_pre_hooks
        or pytorch._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    )


# What would cost a tenth of a step of many small tensors, so it is done where it is asked for: hooks and a name in profiles;
# and a break of the graph in a compiled training step, since pointers are the host's business.
_observed_step = torch.optim.Optimizer.profile_hook_step(OneLaunch._step)
_untraced_step = torch._disable_dynamo(OneLaunch.step)


def zero(params: list[Tensor]) -> None:
    """Sets gradients to 0."""
    torch._foreach_zero_([p.grad for p in params if p.grad is not None])


def on(device: torch.device, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device)
