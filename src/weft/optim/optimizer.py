"""The base of weft's optimizers: PyTorch's ``Optimizer`` over the multi-tensor launch of ``weft.operators.optimizer``."""

from collections.abc import Callable, Sequence
from numbers import Real
from operator import attrgetter, is_
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import optimizer as pytorch

from weft.operators.call import FLOATS, on_gpu
from weft.operators.layout import dense
from weft.operators.optimizer import kernels
from weft.operators.optimizer.dispatch import STEP
from weft.operators.optimizer.multi_tensor import Entry, same_order
from weft.operators.optimizer.rules import Options, Rule
from weft.optim import fallback, state
from weft.optim.options import EVERY, OF_STEPS, check_flags, check_options, each_once, tensor_of
from weft.optim.state import local


class OneLaunch(torch.optim.Optimizer):
    """An optimizer that updates all parameters in one launch. A subclass has a rule and, for parameters that the kernels do not
    take, the same in PyTorch; see docs/notes/optim.md.

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
        foreach, fused, capturable: accepted for compatibility: there is one way here, which is always fused and capturable.
            ``capturable`` and ``fused`` still decide, as in PyTorch, whether ``state_dict`` has steps on the device.
        rounding: of bf16 weights: ``nearest``; ``stochastic`` (up or down at random so that the expectation is right, from
            ``seed``); ``split`` (16 more bits of each weight are the state ``lower_bits``: the two are an fp32 weight).
        state_dtype: of states that have the weight's shape: None for the weight's own, as in PyTorch, or ``torch.float32``.

    Raises:
        ValueError: options out of range, a parameter that is there twice.
        TypeError: an unknown option, a flag that is neither True nor False.
    """

    rule: ClassVar[Rule]
    plain: ClassVar[Callable[..., None]]
    may_lack: ClassVar[tuple[str, ...]] = ()  # names that a loaded state may lack

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
        self.state = state.States(
            self.state, self._changes
        )  # from the start: a caller may hold it before the first step

    def _reset(self) -> None:
        self._changes = state.Changes(changed=True)
        self._overlaps = 0  # objects of class Overlap that step this optimizer
        self._parts: list[Part] = []
        self._replayed: list[Part] = []  # of before, which captured graphs read
        self._plain: list[tuple[int, Tensor]] = []
        self._lists: list[list[Tensor]] = []  # the groups' parameters when the tables were made
        self._watched: Any = None
        self._rest: list[Tensor] = []  # parameters that have had no gradient yet
        self._values: dict[int, tuple[list[type], list[Any]]] = {}  # of options without tensors
        self._forms: dict[int, Any] = {}
        self._formats = state.Formats()
        self._controls: dict[torch.device, Tensor] = {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``torch.amp.GradScaler`` leaves unscaling and skipping to the step: with ``fused=True``, as in PyTorch, on
        which Lightning's clipping and Accelerate's skipped steps rely; where a skipped step has gradients to zero; and with
        steps in backward, which then refuse the scaler."""
        return self.zero_grads or self._overlaps > 0 or any(group["fused"] for group in self.param_groups)

    # ---- groups and options ------------------------------------------------------------------------------------------

    def check(self, options: Options) -> None:
        """Raises ValueError for a group's options that are out of range, TypeError for flags that are not bools; subclasses
        add theirs."""
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
        self._changes.changed = True

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
        if self._changes.changed or not self._up_to_date():
            self._prepare()
        active = [part.collect() for part in self._parts]
        if any(part.outdated for part in self._parts):
            self._prepare()
            active = [part.collect() for part in self._parts]
        plain = [(g, p) for g, p in self._plain if p.grad is not None]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        norm = self.max_norm is not None or self.skip_nonfinite
        if norm and any(part.sharded for part in self._parts):
            raise RuntimeError(
                "max_norm and skip_nonfinite look at this rank's gradients alone, and a parameter is sharded over several; "
                "use torch.nn.utils.clip_grad_norm_, which knows DTensors"
            )
        alone = len(self._parts) == 1 and not plain
        if norm and not alone:
            found = self._measure(plain, scale, found)
        for part, rows in zip(self._parts, active, strict=True):
            self._set_numbers(part, changed)
            part.increment_versions(rows, self.zero_grads)
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

    def overlap_with_backward(self, bucket_mib: float = 32.0) -> "Overlap":
        """From now on steps within backward; see :class:`Overlap`, which is returned."""
        return Overlap(self, bucket_mib)

    @torch.no_grad()
    def step_some(self, params: list[Tensor]) -> None:
        """Steps some parameters now and drops their gradients, if all is prepared; what is not is left to :meth:`step`."""
        changed = [g for g in range(len(self.param_groups)) if self._options_changed(g)]
        ready = not self._changes.changed and self._up_to_date()
        for part in self._parts if ready else ():
            rows = part.collect(params)
            if part.outdated:
                self._changes.changed = True
                return
            self._set_numbers(part, changed)
            part.increment_versions(rows, zeroed=False)
            part.table.launch(rows, zeroed=False)
            for row in range(len(part.params)) if rows is None else rows.nonzero()[0]:
                part.params[row].grad = None

    def _set_numbers(self, part: "Part", changed: list[int]) -> None:
        for group in range(len(self.param_groups)) if part.new else changed:
            options = self.param_groups[group]
            part.table.set_group(group, options, -1.0 if options["maximize"] else 1.0)
        part.new = False

    def _up_to_date(self) -> bool:
        """Whether the groups' parameters and the states are those that the tables were made of (whether a weight has moved is
        checked with its gradient)."""
        groups = self.param_groups
        return (
            len(groups) == len(self._lists)
            and all([same_objects(g["params"], params) for g, params in zip(groups, self._lists, strict=True)])
            and self.state is self._watched
            and all([p.grad is None for p in self._rest])
        )

    def _options_changed(self, index: int) -> bool:
        """Whether a group's options differ from those of the last step (options that are tensors count as changed: comparing
        them would wait for the device)."""
        group = self.param_groups[index]
        values = [v for name, v in group.items() if name != "params"]
        kinds = list(map(type, values))  # also so that no number is compared with a tensor
        if self._values.get(index) == (kinds, values):
            return False
        if any(isinstance(v, Tensor) for v in values):
            self._values.pop(index, None)
        else:
            self._values[index] = kinds, values
        rule, options = self.rule, ("rounding", "state_dtype", "differentiable")
        form = rule.variant(group), rule.states(group), rule.counted(group), *(group[o] for o in options)
        form = *form, *(group.get(o) for o in state.CODE_OPTIONS)
        if self._forms.get(index) != form:
            self._forms[index] = form
            self._changes.changed = True
        return True

    # ---- parameters that PyTorch steps, and several devices ----------------------------------------------------------

    def _step_plain(self, plain: list[tuple[int, Tensor]], scale: Tensor | None, found: Tensor | None) -> None:
        """Parameters on the CPU and those that the kernels do not take, by PyTorch's own functions."""
        control = self._control(plain[0][1].device)
        if found is not None and float(found):
            if not self._parts:
                control[kernels.SKIPPED.value] += 1
            if self.zero_grads:  # else a gradient that is not finite remains, and every later step is skipped for it
                fallback.zero([p for _, p in plain])
            return
        factor = None if self.max_norm is None else control[kernels.FACTOR.value]
        for index, group in enumerate(self.param_groups):
            mine = [p for g, p in plain if g == index]
            if mine:
                grads = [fallback.unscaled(p, type(self).__name__, scale, factor) for p in mine]
                states = [self._state_of(p, group, kernel=False) for p in mine]
                fallback.step(type(self).plain, mine, grads, states, group)
                if self.zero_grads:
                    fallback.zero(mine)

    def _measure(self, plain: list[tuple[int, Tensor]], scale: Tensor | None, found: Tensor | None) -> Tensor | None:
        """The norm of all gradients by PyTorch's functions, where one launch cannot take it: writes norm and clipping factor on
        every device. Returns the flag that skips the step, if any may."""
        params = [p for part in self._parts for p in part.params] + [p for _, p in plain]
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return found
        norm = torch.nn.utils.get_total_norm([g.float() if g.itemsize < 4 else g for g in grads]).float()
        if scale is not None:
            norm = norm / scale.to(norm.device).view(())
        limit = torch.inf if self.max_norm is None else self.max_norm
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        flag = (~norm.isfinite()).float()
        if found is not None:
            flag = torch.maximum(flag, found.to(norm.device).view(()))
        for device in {p.device for p in params}:
            control = self._control(device)
            control[kernels.FACTOR.value], control[kernels.NORM.value] = factor, norm
        return flag if self.skip_nonfinite or found is not None else None

    # ---- preparation -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Makes the tables of all parameters that have had a gradient, and the states that are missing."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() would make or move its state within a CUDA graph capture; call it once "
                "before, with the same parameters and gradients, and leave them in place"
            )
        self._replayed += [part for part in self._parts if part.table.captured]
        self._lists = [list(group["params"]) for group in self.param_groups]
        self._plain, self._rest = [], []
        rows: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if not supported(p, group):
                    self._plain.append((index, p))
                elif p.grad is None and not self.state.get(p):
                    self._rest.append(p)
                else:
                    self._state_of(p, group, kernel=True)
                    rows.setdefault(local(p).device, []).append((index, p))
        self._parts = [Part(self.rule, r, self.param_groups, self.state, self._control(d)) for d, r in rows.items()]
        self.state = self._watched = state.watch(self.state, self._changes)

    def _control(self, device: torch.device) -> Tensor:
        if device not in self._controls:
            self._controls[device] = torch.zeros(kernels.CONTROLS, dtype=torch.float32, device=device)
        return self._controls[device]

    def _state_of(self, p: Tensor, group: dict[str, Any], *, kernel: bool) -> dict[str, Any]:
        """A parameter's state, made where there is none and moved where a checkpoint has left it elsewhere."""
        self._formats.check(p, self.state[p], group)
        self._formats.note(p, group)
        return state.complete(self.state[p], p, group, self.rule, kernel)

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
        return state.export(super().state_dict(), self._parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict`, or that of ``torch.optim``'s optimizer of the same name, has returned.

        Raises:
            ValueError: other groups, a state that lacks something (other than all), or one of another shape or dtype than it
                should be; moments in 8 bits, which ``torch_state_dict()`` of their optimizer gives in 32.
        """
        pairs: state.Pairs = []

        def prepare(given: dict[str, Any]) -> dict[str, Any]:
            pairs.extend(state.pairs_of(self, given))
            if "state_format" not in self.defaults:
                given = state.without_codes(given)
            groups = [{**self.defaults, **group} for group in given["param_groups"]]
            names = [state.names_of(self.rule, group) for group in groups for _ in group["params"]]
            state.check(pairs, names, self.may_lack)
            return given

        state.load(self, state_dict, prepare)
        state.restore_dtypes(pairs, self.state, self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in OF_STEPS}}

    def __setstate__(self, given: dict[str, Any]) -> None:
        super().__setstate__(given)
        if "_changes" not in self.__dict__:
            self._reset()
        self.state = state.States(self.state, self._changes)
        self._changes.changed = True
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for p in group["params"]:
                self._formats.note(p, group)  # what was loaded with the state


def observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step has hooks, or is to be shown in a profile."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or pytorch._global_optimizer_pre_hooks
        or pytorch._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    )


# These would cost a tenth of a step of many small tensors, so a step runs them only where they are needed: hooks and a name in
# profiles; and a break of the graph in a compiled training step, since pointers are known to the host alone.
_observed_step = torch.optim.Optimizer.profile_hook_step(OneLaunch._step)
_untraced_step = torch._disable_dynamo(OneLaunch.step)


def on(device: torch.device, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device)


def same_objects(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def supported(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether the kernels update this parameter."""
    mine = local(p)
    strided = on_gpu(mine) and mine.layout == torch.strided
    return strided and mine.dtype in FLOATS and not group["differentiable"] and dense(mine)


# ---- the parameters of one device ------------------------------------------------------------------------------------

ADDRESS, CONTIGUOUS, STRIDE = Tensor.data_ptr, Tensor.is_contiguous, Tensor.stride
DTYPE, GRAD = attrgetter("dtype"), attrgetter("grad")
# Parameters that are read at once: they and their gradients fit in the cache, no garbage collection starts, and no list takes
# more than 512 bytes, which Python allocates by itself (malloc is slow beyond 1 KiB after a backward).
BATCH = 64


class Part:
    """The parameters of one device and their table.

    Args:
        rows: (group, parameter) of each.
        states: of all parameters, complete.
        control: what this device's launches share.
    """

    def __init__(
        self, rule: Rule, rows: list[tuple[int, Tensor]], groups: list[dict[str, Any]], states: Any, control: Tensor
    ):
        self.params = [p for _, p in rows]
        self.device = control.device
        self.locals = [local(p) for p in self.params]
        self.distributed = any(a is not b for a, b in zip(self.params, self.locals, strict=True))
        self.sharded = any(not place.is_replicate() for p in self.params for place in getattr(p, "placements", ()))
        # of autograd's counters, a DTensor and its shard have one each
        self.written = self.params + self.locals if self.distributed else self.params
        self.outdated, self.new = False, True
        self.copied: list[tuple[Tensor, Tensor]] = []  # gradients of another order than their weight, and in its order
        self.counts = gather([states[p].get("step") for p in self.params], self.device)
        entries = []
        for row, (index, p) in enumerate(rows):
            group, mine, weight = groups[index], states[p], self.locals[row]
            if "step" in mine:
                mine["step"] = self.counts[row]
            coded = state.codes_of(mine, p, group, rule)
            suffix = "" if coded is None else "_codes"
            tensors = [local(mine[name + suffix]) for name in rule.states(group)]
            if group["rounding"] == "split":
                tensors.append(local(mine["lower_bits"]))
            gradient = weight.dtype if p.grad is None else local(p.grad).dtype
            step, how = mine.get("step"), group["rounding"]
            entries.append(Entry(weight, tuple(tensors), step, group, index, how, gradient, group["seed"], coded))
        self.table = STEP.build(rule, entries, (), len(groups), control)
        self.weights = list(map(ADDRESS, self.locals))
        # else a gradient may have another dtype than its weight, or be a tensor within the one that Python has
        self.plain = not self.distributed and all(getattr(p, "grad_dtype", p.dtype) == p.dtype for p in self.params)
        self.batches = []
        for rows_of_batch in (slice(start, start + BATCH) for start in range(0, len(rows), BATCH)):
            params = self.params[rows_of_batch]
            strides = None if all(map(CONTIGUOUS, params)) else list(map(STRIDE, params))
            self.batches.append((rows_of_batch, params, self.weights[rows_of_batch], list(map(DTYPE, params)), strides))

    def collect(self, some: Sequence[Tensor] | None = None) -> np.ndarray | None:
        """Writes the gradients' addresses into the table. Returns which rows have one, or None when all have. Sets
        ``outdated`` where a weight has moved or a gradient has another dtype.

        One pass over the parameters: a pass for each question would load every parameter into the cache again.

        Args:
            some: parameters, of this part or not; rows of others are returned as if they had no gradient.
        """
        self.copied = []
        rest: list[int] = []  # rows of batches with a gradient that is missing, or unlike its weight
        for rows, params, weights, dtypes, strides in self.batches:
            if self.plain and list(map(ADDRESS, params)) == weights:
                grads = list(map(GRAD, params))
                try:
                    self.table.addresses[rows] = addresses = list(map(ADDRESS, grads))
                    alike = all(map(CONTIGUOUS, grads)) if strides is None else list(map(STRIDE, grads)) == strides
                    if alike and all(addresses) and list(map(DTYPE, grads)) == dtypes:
                        continue
                except (TypeError, RuntimeError):  # one is None, or has no memory (sparse)
                    pass
            rest += range(rows.start, rows.start + len(params))
        if not rest and some is None:
            return None
        active = np.ones(len(self.params), bool)
        if some is not None:
            wanted = {id(p) for p in some}
            active[:] = [id(p) in wanted for p in self.params]
            rest = [row for row in rest if active[row]]
        if any(ADDRESS(local(self.params[row])) != self.weights[row] for row in rest):
            self.outdated = True
            return None
        for row in rest:
            self._collect_row(row, self.params[row].grad, active)
        if self.copied and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.table.captured += [copy for _, copy in self.copied]
        return None if active.all() else active

    def _collect_row(self, row: int, g: Tensor | None, active: np.ndarray) -> None:
        """Writes the address of a gradient of any kind, or that there is none."""
        p = self.params[row]
        if g is None:
            active[row], self.table.addresses[row] = False, 0
            return
        if g.layout != torch.strided:
            raise RuntimeError(
                f"weft's optimizers do not support sparse gradients; parameter {row} has one of {g.layout}. "
                "torch.optim.SparseAdam and torch.optim.SGD take them"
            )
        ours, theirs = getattr(p, "placements", None), getattr(g, "placements", None)
        if ours != theirs:
            raise RuntimeError(f"parameter {row} is placed as {ours} and its gradient as {theirs}; expected the same")
        mine, weight = local(g), self.locals[row]
        if mine.numel() and not mine.data_ptr():
            raise RuntimeError(
                f"the gradient of parameter {row} is a {type(g).__name__} without memory of its own; expected a tensor"
            )
        if mine.dtype != self.table.entries[row].gradient:
            self.outdated = True
        elif not same_order(weight, mine):
            self.copied.append((mine, torch.empty_like(weight, dtype=mine.dtype).copy_(mine)))
            mine = self.copied[-1][1]
        self.table.addresses[row] = mine.data_ptr()

    def increment_versions(self, active: np.ndarray | None, zeroed: bool) -> None:
        """Increments the versions of what the launch writes: a tensor may have been saved for a gradient."""
        written = self.written
        if active is not None:
            rows = np.flatnonzero(active).tolist()
            written = [each[row] for each in (self.params, self.locals)[: 1 + self.distributed] for row in rows]
        if zeroed:
            written = written + [p.grad for p in self.params if p.grad is not None]
        torch.autograd.graph.increment_version(written)

    def zero_copied(self) -> None:
        for gradient, _ in self.copied:
            gradient.zero_()


def gather(steps: Sequence[Any], device: torch.device) -> Tensor:
    """Counts of steps, of which some may be on the CPU or missing, in one fp32 tensor."""
    if all(not isinstance(s, Tensor) or s.device.type == "cpu" for s in steps):
        return torch.tensor([float(s or 0) for s in steps], dtype=torch.float32, device="cpu").to(device)
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([s.to(device, torch.float32).reshape(()) if isinstance(s, Tensor) else zero for s in steps])


# ---- steps within backward -------------------------------------------------------------------------------------------


class Overlap:
    """Hooks that step an optimizer during backward, until :meth:`remove`: a bucket of parameters is updated as soon as its
    gradients are there, which are then freed.

    Every backward is then a step: no gradients are accumulated over several. ``step()`` is still to be called after each; it
    updates what is left: all parameters at the first time, those whose bucket was not complete, and those that PyTorch steps
    (on a CPU all). So is ``zero_grad()``: only gradients that were stepped in backward are freed. Learning rates are those at
    the time of backward.

    Args:
        optimizer: without ``max_norm`` and ``skip_nonfinite``, which need all gradients.
        bucket_mib: size of a bucket's gradients, MiB; each bucket is one launch.

    Raises:
        ValueError: an optimizer that needs all gradients at once, a negative bucket.
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
        self.waiting: dict[int, int] = {}  # bucket → gradients that are missing
        bucket: list[Tensor] = []
        filled = 0
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for p in reversed(params):  # in about the order of backward
            bucket.append(p)
            self.bucket_of[id(p)] = bucket
            filled += p.numel() * p.element_size()
            if filled >= bucket_mib * 2**20:
                bucket, filled = [], 0
        self._start_over()
        optimizer._overlaps += 1
        self.handles: list[Any] = [p.register_post_accumulate_grad_hook(self._accumulated) for p in params]
        self.handles.append(optimizer.register_step_pre_hook(self._refuse_scale))
        self.handles.append(optimizer.register_step_post_hook(lambda *_: self._start_over()))

    def _start_over(self) -> None:
        self.waiting = {id(bucket): len(bucket) for bucket in self.bucket_of.values()}

    def _accumulated(self, p: Tensor) -> None:
        bucket = self.bucket_of[id(p)]
        self.waiting[id(bucket)] -= 1
        if self.waiting[id(bucket)] == 0:
            self.optimizer.step_some(bucket)

    def _refuse_scale(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("a gradient scaler needs all gradients at once: it does not go with steps in backward")

    def remove(self) -> None:
        """From now on only ``step()`` steps."""
        self.optimizer._overlaps -= bool(self.handles)
        while self.handles:
            self.handles.pop().remove()
