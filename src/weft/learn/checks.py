"""``t``: what a check has to compare, to count and to fail with.

A check is ``def check(learner, t)`` in an exercise's ``check.py``. It runs in the checker's process; ``learner.f(x)`` runs
``f`` in the learner's, on a copy of ``x``. Inputs come from a secret seed, drawn anew for each check.
"""

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.learn import process
from weft.learn.language import Text

STAGES = ("parse", "run", "right", "safe", "predict", "fast")


class Rejected(Exception):
    """The learner's file fails a stage."""

    def __init__(self, stage: str, why: Text, *more: Text) -> None:
        super().__init__(why.en)
        self.stage, self.why, self.more = stage, why, more


class Checks:
    """The checks' tools.

    Attributes:
        seed: Secret, of this check.
        rng: NumPy's generator with that seed.
        notes: What a pass says beside its tick.
    """

    def __init__(
        self, running: process.Process | None = None, sources: dict[str, str] | None = None, seed: int | None = None
    ):
        self.seed = secrets.randbits(32) if seed is None else seed
        self.running, self.sources = running, sources or {}
        self.notes: list[Text] = []
        self.printed: list[str] = []  # by CUDA kernels
        self.kernels: list[dict[str, Any]] = []  # what launches of CUDA kernels did, as ``launches``
        self.traced = 0  # warps whose accesses are kept
        self.limit: dict[str, str] = {}
        self.machine: dict[str, Any] = {}
        self.reached: set[str] = set()  # the stages that were checked
        self._rng: Any = None

    # ---- inputs

    @property
    def rng(self) -> Any:
        if self._rng is None:
            import numpy as np

            self._rng = np.random.default_rng(self.seed)
        return self._rng

    def randn(self, *shape: int, dtype: str = "float32") -> Any:
        """A tensor of normal values, of which no two are equal in practice."""
        import torch

        return torch.from_numpy(self.rng.standard_normal(shape)).to(getattr(torch, dtype))

    def integers(self, low: int, high: int, *shape: int) -> Any:
        """A tensor of int64 from low to high - 1; without a shape, one Python int."""
        values = self.rng.integers(low, high, shape)
        if not shape:
            return int(values)
        import torch  # where a tensor is asked for: it takes seconds

        return torch.from_numpy(values)

    def source(self, suffix: str = ".py") -> str:
        """The learner's file."""
        return self.sources[suffix]

    def value(self, remote: Any) -> Any:
        """The value of a name in the learner's file: ``t.value(learner.ANSWER)``."""
        return process.value(remote)

    def probe(self, name: str, *args: Any) -> Any:
        """The result of a function of ``probe.py``, run in the learner's process as ``f(exercise, *args)``.

        For what cannot be sent between processes, such as a training loop. What is expected must not be in it.
        """
        if self.running is None:
            raise TypeError("this exercise has no Python file to probe")
        return self.running.request(do="probe", name=name, args=list(args))

    # ---- right

    def require(self, condition: Any, en: str, zh: str, stage: str = "right") -> None:
        """Fails a stage with a message, unless the condition holds."""
        if stage not in ("parse", "run", "right"):
            self.safe()
        self.reached.add(stage)
        if not condition:
            raise Rejected(stage, Text(en, zh))

    def equal(self, got: Any, expected: Any, what: str, stage: str = "right") -> None:
        """Exactly equal: numbers, strings, lists, arrays, tensors. NaN equals NaN alone.

        Args:
            what: The call that gave it, as code: ``dot([1, 2], [3, 4])``.
        """
        self._compare(got, expected, what, 0.0, 0.0, stage)

    def close(
        self, got: Any, expected: Any, what: str, rtol: float = 1e-5, atol: float = 1e-6, stage: str = "right"
    ) -> None:
        """Equal within ``atol + rtol * |expected|``. NaN and infinities must be where they are expected, and nowhere else."""
        self._compare(got, expected, what, rtol, atol, stage)

    def _compare(self, got: Any, expected: Any, what: str, rtol: float, atol: float, stage: str) -> None:
        self.reached.add(stage)
        if isinstance(got, process.Remote):
            raise Rejected(
                stage,
                Text(
                    f"{what} returned a {got._type}; expected is a {type(expected).__name__}",
                    f"{what} 返回了 {got._type}；应为 {type(expected).__name__}",
                ),
            )
        if hasattr(expected, "shape") and hasattr(expected, "dtype") and expected.shape:
            self._compare_arrays(got, expected, what, rtol, atol, stage)
            return
        if hasattr(expected, "item"):
            expected = expected.item()
        if hasattr(got, "item") and not getattr(got, "shape", ()):
            got = got.item()
        if isinstance(expected, list | tuple):
            if not isinstance(got, list | tuple):
                raise Rejected(stage, _differs(what, got, expected))
            if len(got) != len(expected):
                raise Rejected(stage, _other_length(what, got, expected))
            for i, (g, e) in enumerate(zip(got, expected, strict=True)):
                self._compare(g, e, f"{what}[{i}]", rtol, atol, stage)
            return
        if not _same(got, expected, rtol, atol):
            raise Rejected(stage, _differs(what, got, expected))

    def _compare_arrays(self, got: Any, expected: Any, what: str, rtol: float, atol: float, stage: str) -> None:
        import numpy as np

        wanted = tuple(expected.shape)
        if not hasattr(got, "shape") or not hasattr(got, "dtype"):
            kind = type(got).__name__
            raise Rejected(
                stage,
                Text(
                    f"{what} returned {'nothing (None)' if got is None else f'a {kind}'}; expected is a "
                    f"{type(expected).__name__} of shape {wanted}",
                    f"{what} 返回了{'空值 (None)' if got is None else f' {kind}'}；应返回形状为 {wanted} 的 "
                    f"{type(expected).__name__}",
                ),
            )
        if tuple(got.shape) != wanted:
            raise Rejected(
                stage,
                Text(
                    f"{what} has shape {tuple(got.shape)}; expected is {wanted}",
                    f"{what} 的形状是 {tuple(got.shape)}，应为 {wanted}",
                ),
            )
        if _dtype(got) != _dtype(expected):
            raise Rejected(
                stage,
                Text(
                    f"{what} has dtype {_dtype(got)}; expected is {_dtype(expected)}",
                    f"{what} 的数据类型是 {_dtype(got)}，应为 {_dtype(expected)}",
                ),
            )
        g, e = _array(got), _array(expected)
        with np.errstate(all="ignore"):
            near = np.abs(g - e) <= atol + rtol * np.abs(e) if g.dtype.kind in "fc" else g == e
            right = near | (g == e) | (np.isnan(g) & np.isnan(e))
        wrong = np.argwhere(~right)
        if not len(wrong):
            return
        with np.errstate(all="ignore"):
            error = np.where(right, 0.0, np.abs(g.astype(np.float64) - e.astype(np.float64)))
        error = np.where(np.isnan(error), np.inf, error)
        worst = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
        first = tuple(map(int, wrong[0]))
        en = [f"{what}: {len(wrong):,} of {g.size:,} elements are wrong"]
        zh = [f"{what}：{g.size:,} 个元素中有 {len(wrong):,} 个错误"]
        for name, name_zh, at in (("first", "第一个", first), ("worst", "误差最大", worst)):
            if name == "worst" and worst == first:
                continue
            flat = index_arithmetic(at, wanted)
            off = "" if g.dtype.kind not in "fciu" else f"{error[at]:.3g}"
            en.append(f"  {name}: {flat}: {_number(g[at])}, expected {_number(e[at])}{off and f' (off by {off})'}")
            zh.append(f"  {name_zh}：{flat}：{_number(g[at])}，应为 {_number(e[at])}{off and f'（相差 {off}）'}")
        if rtol or atol:
            en.append(f"  allowed is {atol:g} + {rtol:g} · |expected|")
            zh.append(f"  允许误差为 {atol:g} + {rtol:g} · |期望值|")
        raise Rejected(stage, Text("\n".join(en), "\n".join(zh)))

    def writing(self, remote: Any) -> Any:
        """The function, allowed to change its arguments: ``t.writing(learner.add)(x, y, out)``; the changes come back.

        Any other function that changes an argument is rejected.
        """
        remote._writes = True
        return remote

    def unchanged(self, got: Any, before: Any, name: str) -> None:
        """What a probe passed and gave back, and the learner's code may read only."""
        try:
            self.equal(got, before, name)
        except Rejected as error:
            raise Rejected(
                "right",
                Text(f"the function changed its argument {name}, which it may only read", f"函数修改了只读参数 {name}"),
                error.why,
            ) from None

    def raises(self, call: Callable[[], Any], error: str, what: str) -> None:
        """The call must raise an exception of that type."""
        try:
            got = call()
        except process.Failed as failed:
            if failed.error["type"] == error:
                return
            raise
        raise Rejected(
            "right",
            Text(
                f"{what} returned {_short(got)}; it must raise {error}", f"{what} 返回了 {_short(got)}；应抛出 {error}"
            ),
        )

    # ---- safe

    @property
    def launches(self) -> list[dict[str, Any]]:
        """What the kernels of the last call did: see ``interpreter.Launch``."""
        return self.running.launches if self.running else []

    def safe(self) -> None:
        """Fails the stage *safe* where a kernel accessed memory out of bounds, or two of its programs raced for an element.

        Runs by itself at the end of the check and before the stages that follow.
        """
        every = self.running.all_launches if self.running else []
        if every:
            self.reached.add("safe")
        for launch in every:
            for problem in launch["problems"]:
                raise Rejected("safe", Text(*problem))

    def any_order(self, call: Callable[[], Any], what: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """The call's result must not depend on the order in which programs run: a GPU promises none.

        Runs the call with programs in another order, and with programs that take turns at each load and store.
        """
        expected = call()
        for order, zh in (("shuffled", "打乱"), ("interleaved", "交错")):
            with self._programs(order):
                try:
                    self.close(call(), expected, what, rtol, atol)
                except Rejected as error:
                    raise Rejected(
                        "safe",
                        Text(
                            f"the result changes when programs run {order}: a GPU promises no order, so this is a race",
                            f"实例以{zh}顺序运行时结果会变：GPU 不保证任何顺序，因此这是竞争(race)",
                        ),
                        error.why,
                    ) from None

    @contextmanager
    def _programs(self, order: str) -> Iterator[None]:
        if self.running is None:
            raise TypeError("this exercise has no Python file to run")
        before = self.running.options
        self.running.options = {**before, "order": order, "seed": self.seed}
        try:
            yield
        finally:
            self.running.options = before

    # ---- predict and fast

    def predict(self, name: str, said: Any, true: Any, en: str = "", zh: str = "", within: float = 0.0) -> None:
        """The learner's prediction: right within a share of the true value.

        Args:
            name: Of the constant in the learner's file.
            en, zh: How the true value is found, without giving it away.
        """
        self.safe()
        self.reached.add("predict")
        said = self.value(said)
        if said is None or said is ...:
            raise Rejected(
                "predict",
                Text(f"{name} is not filled in: predict before you measure", f"{name} 尚未填写：先预测，再测量"),
            )
        if isinstance(true, str) and isinstance(said, str):
            right = said.strip().lower() == true.lower()
        else:
            right = _same(said, true, within, 0.0)
        if not right:
            close = Text(f" (within {within:.0%})", f"（误差 {within:.0%} 以内）") if within else Text("", "")
            raise Rejected(
                "predict",
                Text(
                    f"{name} = {_short(said)} is not right{close.en}. {en}".strip(),
                    f"{name} = {_short(said)} 不对{close.zh}。{zh}",
                ),
            )

    def at_most(self, got: float, limit: float, en: str, zh: str) -> None:
        """A count (bytes, transactions, operations) must not exceed a limit: the stage *fast* without a GPU.

        Args:
            en, zh: What is counted: "32-byte sectors read".
        """
        self.safe()
        self.reached.add("fast")
        if got > limit:
            raise Rejected(
                "fast",
                Text(f"{got:,.0f} {en}; at most {limit:,.0f} are needed", f"{zh}：{got:,.0f}；最多只需要 {limit:,.0f}"),
            )
        self.note(f"{got:,.0f} {en} (limit {limit:,.0f})", f"{zh}：{got:,.0f}（上限 {limit:,.0f}）")

    def timed(
        self,
        remote: Any,
        args: list[Any],
        expected: Callable[..., Any],
        what: str,
        at_least: float,
        rtol: float = 1e-4,
        atol: float = 1e-5,
        dtype: str = "fp32",
        **shape: int,
    ) -> None:
        """On a GPU: the share of the limit that a function reaches, cold; the stage *fast*. For a check's ``fast(learner, t)``.

        Args:
            args: Of a call: at least some 20 MB, so that 16 copies are larger than the GPU's cache.
            expected: Gives the right output for such arguments.
            at_least: The share of the limit (the exercise's bytes and FLOPs at this machine's measured rates) that passes.
            dtype: Of the matrix products, for the FLOPs' rate.
            shape: The names in the exercise's ``limit``.
        """
        from weft.learn import timed

        if self.running is None:
            raise TypeError("this exercise has no Python file to time")
        self.reached.add("fast")
        found = timed.measure(self.running.request, remote._base, list(remote._path), args, self.rng)
        for got, inputs in zip(found.outputs, found.inputs, strict=True):
            self.close(got, expected(*inputs), f"{what} in the timed rounds", rtol, atol)
        self.share(found.us, what, at_least, dtype, **shape)

    def share(self, us: float, what: str, at_least: float, dtype: str = "fp32", **shape: int) -> None:
        """A time in microseconds as a share of the exercise's limit on this machine, which must be ``at_least``."""
        self.reached.add("fast")
        cost = {key: eval(text, {"__builtins__": {}}, dict(shape)) for key, text in self.limit.items()}
        rates = {"bytes": self.machine["dram_gb_s"] * 1e9, "flops": self.machine[f"{dtype}_gflop_s"] * 1e9}
        limit_us, binds = max((cost[key] / rates[key] * 1e6, key) for key in cost)
        share = limit_us / us
        by = {"bytes": Text("memory", "内存"), "flops": Text("arithmetic", "计算")}[binds]
        said = Text(
            f"{what}: {us:,.1f} µs, {share:.0%} of the limit ({limit_us:,.1f} µs, {by.en})",
            f"{what}：{us:,.1f} µs，达到极限的 {share:.0%}（{limit_us:,.1f} µs，{by.zh}）",
        )
        if share < at_least:
            raise Rejected("fast", said, Text(f"at least {at_least:.0%} is asked for", f"要求至少 {at_least:.0%}"))
        self.notes.append(said)

    def count(self, name: str) -> int:
        """Sum over the last call's launches: ``bytes_read``, ``bytes_written``, ``sectors_read``, ``sectors_written``,
        ``flops``, ``programs``, ``loads``, ``stores``, ``atomics``."""
        return sum(launch["counts"][name] for launch in self.launches)

    def note(self, en: str, zh: str) -> None:
        """A line beside the tick of a pass."""
        self.notes.append(Text(en, zh))


def index_arithmetic(at: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """``[2, 5] (element 2·10 + 5 = 25)``: where an element lies in a contiguous array."""
    if len(at) == 1:
        return f"[{at[0]}]"
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    terms = " + ".join(f"{i}·{s}" if s != 1 else str(i) for i, s in zip(at, strides, strict=True))
    return f"[{', '.join(map(str, at))}] ({terms} = {sum(i * s for i, s in zip(at, strides, strict=True))})"


def load(path: Path) -> dict[str, Any]:
    """The functions of a check.py: ``check``, and ``fast`` where it has one."""
    import runpy

    return runpy.run_path(str(path))


def _same(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return type(got) is type(expected) and bool(got == expected)
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    if math.isnan(expected) or math.isnan(got):
        return math.isnan(expected) and math.isnan(got)
    return got == expected or abs(got - expected) <= atol + rtol * abs(expected)


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _array(x: Any) -> Any:
    """As NumPy; what NumPy does not have (bf16, fp8) as float32."""
    import numpy as np

    if isinstance(x, np.ndarray):
        return x
    x = x.detach().cpu()
    if x.dtype.is_floating_point and x.dtype.itemsize < 4:
        x = x.float()
    return x.numpy()


def _number(x: Any) -> str:
    return f"{x:.6g}" if hasattr(x, "dtype") and x.dtype.kind == "f" else str(x)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _other_length(what: str, got: Any, expected: Any) -> Text:
    """A list of another length, and where it first differs."""
    pairs = [] if any(hasattr(v, "shape") for v in (*got, *expected)) else list(zip(got, expected, strict=False))
    at = next((i for i, (g, e) in enumerate(pairs) if not _same(g, e, 0.0, 0.0)), min(len(got), len(expected)))
    shown = [_short(values[at]) if at < len(values) else "–" for values in (got, expected)]
    return Text(
        f"{what} returned {len(got)} items; expected are {len(expected)}. The first difference is [{at}]: {shown[0]}, "
        f"expected {shown[1]}",
        f"{what} 返回了 {len(got)} 项；应为 {len(expected)} 项。第一处不同：[{at}]：{shown[0]}，应为 {shown[1]}",
    )


def _differs(what: str, got: Any, expected: Any) -> Text:
    return Text(
        f"{what} returned {_short(got)}; expected is {_short(expected)}",
        f"{what} 返回了 {_short(got)}；应为 {_short(expected)}",
    )
