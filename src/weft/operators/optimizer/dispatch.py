"""Which kernel makes a step: the family's one table, and the calls that read it."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator
from weft.operators.call import FLOATS, Choice, guarded, traced
from weft.operators.checks import check_device, check_flag, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import compile_request
from weft.operators.layout import dense
from weft.operators.optimizer.multi_tensor import AdamTable, AdamW8bitTable, Codes, CudaTable, Entry, Table, same_order
from weft.operators.optimizer.rules import ADAM, Rule

MANY = 2**22  # elements; below, the launch itself is what counts


@dataclass
class Step(Call):
    """One step of an optimizer for the parameters of one device."""

    rule: Rule
    entries: Sequence[Entry]
    # one for each entry, where their layout matters; ``weft.optim`` copies those of another order
    grads: Sequence[Tensor] = ()
    groups: int = 1
    control: Tensor | None = None  # see :class:`Table`

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return self.entries[0].param

    @property
    def empty(self) -> bool:
        return not self.entries

    @property
    def traced(self) -> bool:
        """Never of an optimizer's step, which breaks the graph: it passes ``control``."""
        return self.control is None and traced(*(e.param for e in self.entries))

    @property
    def cuda_table(self) -> type[CudaTable]:
        return AdamW8bitTable if any(e.codes for e in self.entries) else AdamTable

    @property
    def cuda_elements(self) -> int:
        """Elements of the weights that the kernel in CUDA C++ updates; of fp32 with 32-bit moments none, Triton's is faster."""
        rows = zip(self.entries, self.cuda_table.taken_of(self.entries), strict=True)
        return sum(e.param.numel() for e, taken in rows if taken and (e.codes or e.param.element_size() == 2))

    def obstacle(self) -> str:
        """Why no kernel takes these tensors ("" when one does)."""
        for i, e in enumerate(self.entries):
            dtypes = e.gradient, *(s.dtype for s in e.states)
            if e.param.dtype not in FLOATS or any(d not in (*FLOATS, torch.uint8, torch.int16) for d in dtypes):
                return "float64, which the kernels do not compute in"
            beside = *e.states, *self.grads[i : i + 1]
            if not dense(e.param) or not all(same_order(e.param, t) for t in beside):
                return "tensors with gaps, or a state or gradient whose strides are not the weight's"
        return ""

    def cuda_obstacle(self) -> str:
        if self.rule is not ADAM:
            return "the kernels in CUDA C++ are for Adam and AdamW"
        if self.sm != 90:
            return f"compiled for sm_90, this is sm_{self.sm}"
        reasons = [self.cuda_table.unsupported(e) for e in self.entries]
        return self.obstacle() or ("" if "" in reasons else reasons[0])

    def table(self, kind: type[Table]) -> Table:
        return kind(self.rule, self.entries, self.groups, self.control)


STEP = Dispatch(
    Step, EMPTY, ON_CPU, TRACED,
    Route("cuda", lambda c: c.cuda_elements >= MANY,
          "many elements of 16 bits or with 8-bit moments, on Hopper: fewer instructions an element",
          lambda c: c.table(c.cuda_table), Step.cuda_obstacle, sm=90),
    Route("triton", lambda c: True, "dense tensors of one order: one launch for all of them",
          lambda c: c.table(Table), Step.obstacle),
    Route("torch", lambda c: True, "float64, tensors with gaps, or a state or gradient of other strides than its weight"),
)  # fmt: skip


Lists = dict[str, Sequence[Tensor]]  # name of an argument → its tensors


@dataclass
class Arguments:
    """The arguments of an operator of this family."""

    rule: Rule
    lists: Lists  # weights, gradients, then the rule's states
    options: dict[str, Any]  # of a parameter group; of 8-bit states ``block_size``, ``state_format`` and ``seed`` too
    maximize: bool
    steps: Sequence[Tensor] | None = None  # counts of steps, where the rule counts
    scales: Lists = field(default_factory=dict)  # of 8-bit states

    def step(self) -> tuple[Rule, list[Entry], Sequence[Tensor]]:
        """What :class:`Step` is made of."""
        params, grads, *states = self.lists.values()
        none, options = [None] * len(params), self.options
        seed = options.get("seed")
        scales = zip(*self.scales.values(), strict=True)
        codes = [Codes(pair, options["block_size"], options["state_format"], seed is not None) for pair in scales]
        entries = [
            Entry(p, tuple(of_p), count, options, gradient=g.dtype, seed=seed or 0, codes=code)
            for p, g, count, code, *of_p in zip(params, grads, self.steps or none, codes or none, *states, strict=True)
        ]
        return self.rule, entries, grads

    # What a table and the checks of tensors depend on. Of many small tensors this is most of a step: loops are those of
    # ``map``, and no object stays that the garbage collector would look at.

    def key(self) -> Any:
        """The memory of weights and states, and constants; None where no table is cached, and for what are no lists."""
        try:
            params, grads, *states = self.lists.values()
            if not params or compile_request() is not None or traced(*params):
                return None
            held = params, *states, self.steps or (), *self.scales.values()
            memory = tuple(tuple(map(Tensor.data_ptr, ts)) for ts in held)
            constants = tuple(self.options.get(name) for name in ("seed", "block_size", "state_format"))
            key = self.rule, self.rule.variant(self.options), constants, memory, len(grads)
            hash(key)
        except (TypeError, RuntimeError):
            return None
        return key

    def forms(self) -> Iterator[Iterator[Any]]:
        """Dtypes, shapes and strides."""
        _, grads, *_ = self.lists.values()
        yield map(DEVICE, grads)  # its memory may be elsewhere at every step
        yield map(Tensor.is_neg, grads)
        for tensors in (*self.lists.values(), self.steps or (), *self.scales.values()):
            yield from (map(form, tensors) for form in FORM)

    def cached(self, key: Any) -> Table | None:
        """The table of an earlier step whose arguments differ in the gradients' memory and numbers alone."""
        table = TABLES.get(key)
        if table is None:
            return None
        try:
            alike = all(all(map(eq, now, then)) for now, then in zip(self.forms(), table.forms, strict=True))
        except (TypeError, RuntimeError):  # a gradient that is no dense tensor
            return None
        return table if alike else None

    def launch(self, kernel: str = "", check: Callable[["Arguments"], None] = lambda a: None) -> bool:
        """Makes the step with a kernel of this name, else with the one that :data:`STEP` chooses. The table of pointers is
        cached, and tensors are checked when it is made. Returns False where the step is PyTorch's."""
        found = self.key()
        key = (kernel, found)
        table = None if found is None else self.cached(key)
        if table is None:
            check(self)
        params, grads, *states = self.lists.values()
        if not params and kernel:
            return True
        if table is None:
            table = STEP.kernel(kernel).build(*self.step()) if kernel else STEP.build(*self.step())
            if table is None:
                return False
            if kernel and (reason := table.not_alone()):  # what is measured by a kernel's name is that kernel alone
                raise Declined(reason)
            if found is not None:
                if len(TABLES) >= 64:
                    for old in [k for k, t in TABLES.items() if not t.captured]:  # graphs read the others
                        del TABLES[old]
                if key in TABLES:  # of other forms; a graph may read it
                    TABLES[object()] = TABLES.pop(key)
                TABLES[key], table.forms = table, [tuple(form) for form in self.forms()]
        table.addresses[:] = list(map(Tensor.data_ptr, grads))
        table.set_group(0, self.options, -1.0 if self.maximize else 1.0)
        # autograd must know what the kernel writes: a tensor may have been saved for a gradient
        written = params, *states, self.steps or (), *self.scales.values()
        torch.autograd.graph.increment_version([t for ts in written for t in ts])
        table.launch()
        return True


TABLES: dict[Any, Table] = {}
FORM = *(getattr(Tensor, name).__get__ for name in ("dtype", "shape")), Tensor.stride
DEVICE = Tensor.device.__get__


def register(
    operator: Operator, rule: Rule, states: Sequence[str], numbers: Sequence[str], *, optional: str = "",
    scales: Sequence[str] = (), kernels: Sequence[str] = ("triton",),
    check: Callable[[Arguments], None] = lambda a: None, check_tensors: Callable[[Arguments], None] = lambda a: None,
    **options: Any,
) -> Callable[..., None]:  # fmt: skip
    """Adds the operator's kernels and its choice. Returns its step, by the chosen kernel or the reference, of arguments in the
    reference's order.

    Args:
        states: arguments that are lists of the rule's states.
        optional: which of them may be None: then the rule has none of this name.
        numbers: arguments that are numbers of 0 or more.
        scales: arguments that are lists of scales of 8-bit states.
        check: raises TypeError or ValueError for numbers that may be wrong besides.
        check_tensors: the same for lists, and for what ``Arguments.key`` has of the options.
        options: of the rule, the same in all calls.
    """

    def arguments(*, maximize: bool, steps: Sequence[Tensor] | None = None, **given: Any) -> Arguments:
        lists, of_blocks = ({n: given.pop(n) for n in names} for names in (("params", "grads", *states), scales))
        if optional and lists[optional] is None:
            del lists[optional]
        made = {**given, **options, "amsgrad": "max_exp_avg_sqs" in lists}
        return Arguments(rule, lists, made, maximize, steps, of_blocks)

    def checked(**given: Any) -> Arguments:
        made = arguments(**given)
        check_options(operator.name, made, *numbers)
        check(made)
        return made

    def check_all(made: Arguments) -> None:
        check_lists(operator.name, {n: ts for n, ts in made.lists.items() if not n.endswith("codes")}, made.steps)
        check_tensors(made)

    def by_kernel(kernel: str, **given: Any) -> None:
        arguments(**given).launch(kernel)

    for kernel in kernels:
        only = {"arch": "==sm_90", "devices": ("cuda",)} if kernel == "cuda" else {"arch": ">=sm_80"}
        operator.implementation(kernel, **only)(functools.partial(by_kernel, kernel))

    @operator.choice
    @guarded
    def choose(*args: Any, **named: Any) -> Choice:
        assert operator.public is not None  # it is defined below in the operator's module
        given = inspect.signature(operator.public).bind(*args, **named)
        given.apply_defaults()
        made = checked(**given.arguments)
        check_all(made)
        return STEP.choose(*made.step())

    names = tuple(inspect.signature(operator.reference).parameters)

    def step(*given: Any) -> None:
        if not checked(**dict(zip(names, given, strict=True))).launch(check=check_all):
            operator.reference(*given)

    return step


def check_lists(operator: str, lists: Lists, steps: Sequence[Tensor] | None = None) -> None:
    """Raises TypeError or ValueError unless all lists are as long as the first, and their tensors of its shapes and device."""
    first, params = next(iter(lists.items()))
    every = lists if steps is None else {**lists, "steps": steps}
    for name, tensors in every.items():
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            raise TypeError(f"{operator}: argument '{name}' is a {type(tensors).__name__}; expected a list of tensors")
        if len(tensors) != len(params):
            counted = f"has {len(tensors)} tensors and '{first}' has {len(params)}"
            raise ValueError(f"{operator}: argument '{name}' {counted}; expected the same number")
    for i, p in enumerate(params):
        for name, tensors in every.items():
            argument = f"{name}[{i}]"
            dtypes: tuple[torch.dtype, ...] = (*FLOATS, torch.float64)
            if name == "steps":  # kernels know no other
                dtypes = (torch.float32,) if p.dtype in FLOATS else (torch.float32, torch.float64)
            check_tensor(operator, argument, tensors[i], dtypes)
            check_device(operator, argument, tensors[i], f"{first}[0]", params[0])
            wanted = () if name == "steps" else tuple(p.shape)
            check_shape(operator, argument, tensors[i], tensors[i].shape == wanted, f"{wanted}")


def check_options(operator: str, a: Arguments, *numbers: str) -> None:
    """Raises TypeError or ValueError unless ``maximize`` is a bool, the numbers are 0 or more and both betas are in [0, 1)."""
    check_flag(operator, "maximize", a.maximize)
    for name in numbers:
        check_number(operator, name, a.options[name])
    betas = a.options.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{operator}: argument 'betas' is {betas!r:.40}; expected two numbers")
    for i, beta in enumerate(betas):
        check_number(operator, f"betas[{i}]", beta, 1)


def check_number(operator: str, name: str, value: Any, below: float = math.inf) -> None:
    """Raises ValueError unless the number is in [0, below). The value of a tensor is not read, as that waits for the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{operator}: argument '{name}' has {value.numel()} elements; expected one")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{operator}: argument '{name}' is {value!r:.40}; expected a number of 0 or more{limit}")
