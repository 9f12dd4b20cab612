"""The training loop of both jobs, on one device or over torchrun's ranks."""

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.hardware import query
from weft.train import checkpoint, flops, ranks, techniques
from weft.train.jobs import Job, job, steps_of
from weft.train.log import Log
from weft.train.settings import JOB, Settings

Batch = tuple[Tensor, Tensor]
WARM_UP = 1 / 20  # of the steps
STARTING = 3  # first steps of a process, which compile and allocate, are not in the median


class NotFinite(ArithmeticError):
    """The loss or the gradient of a step is NaN or infinite; the message names step, examples and the saved state."""


@dataclass
class Result:
    """What a run reached. ``loss`` is the mean of each step's targets before its update; times are of one step, the median."""

    job: str
    device: str
    hardware: str
    ranks: int
    parameters: int
    steps: int = 0
    loss: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)  # steps whose loss or gradient was not finite
    validation_loss: float | None = None
    accuracy: float | None = None  # 0 … 1, of the validation images
    step_ms: float | None = None
    rate: float | None = None  # images or tokens a second, of all ranks
    unit: str = ""
    flops_per_step: int = 0
    mfu: float | None = None  # 0 … 1, of the matrix rate measured on this machine; None without a record of it
    peak_memory_bytes: int | None = None  # of the device; None on a CPU
    seconds: float = 0.0
    interrupted: bool = False
    checkpoint: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    settings: Settings, *, on_step: Callable[[int, int, dict[str, Any]], None] | None = None, save: bool = True
) -> Result:
    """Trains as the settings say and returns what was reached.

    Args:
        on_step: called on rank 0 after each step with (steps done, steps in all, the step's figures).
        save: whether logs and checkpoints are written.

    Raises:
        NotFinite: a loss or gradient is not finite, and ``skip_nan`` is off.
        ValueError: settings that do not go together or with this machine; a checkpoint of another model.
        FileNotFoundError: data, or with ``resume`` a checkpoint, that are not there.
        OSError: a checkpoint cannot be written, or the log; then the run ends after the next step, with a checkpoint.
    """
    device = ranks.choose_device(settings.device)
    if settings.cuda_graph and device.type != "cuda":
        raise ValueError("cuda_graph needs a GPU; this run is on a CPU")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grouped = ranks.group(settings.parallel, tensor_ranks(settings), device)
    with grouped, techniques.usual_defaults(), techniques.backends(settings), torch.enable_grad():
        return Run(settings, device, save, on_step).go()


def tensor_ranks(settings: Settings) -> int:
    """How many ranks share each layer."""
    return getattr(settings, "tensor_parallel", 1)


class Run:
    def __init__(self, settings: Settings, device: torch.device, save: bool, on_step: Any) -> None:
        self.settings, self.device, self.save, self.on_step = settings, device, save, on_step
        self.tensor = tensor_ranks(settings)
        self.sharing = ranks.world() // self.tensor  # ranks that share batches
        if settings.batch < self.sharing * settings.accumulate:
            parts = f"{self.sharing} rank(s) x {settings.accumulate} accumulated part(s)"
            raise ValueError(f"batch is {settings.batch}, but is divided into {parts}; take a larger one")
        self.job: Job = job(settings)
        self.steps = steps_of(settings, self.job)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(settings.seed)  # weights are drawn on the CPU: the same on every device
            self.model = self.job.build().to(device)
        torch.manual_seed(settings.seed + ranks.rank() // self.tensor)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if getattr(settings, "channels_last", False):
            self.model = self.model.to(memory_format=torch.channels_last)
        self.model = ranks.wrap(self.model, settings, self.tensor, device)
        self.optimizer = techniques.optimizer(settings, self.model)
        self.rates = [group["lr"] / settings.lr if settings.lr else 0.0 for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
        self.graph: techniques.Graph | None = None
        self.began = checkpoint.beginning(settings.out)  # the run, of which this may be a part that goes on
        self.jobs = ranks.distinct(os.environ.get(JOB, ""))  # several where each node has a weft launch of its own
        self.asked = 0.0  # when a signal asked this rank to stop
        self.stop = False  # what all ranks agreed on

    def go(self) -> Result:
        settings, device = self.settings, self.device
        start = self.resumed() if settings.resume or self.started_again() else 0
        result = Result(
            self.job.name, device.type, query.name(device.type), ranks.world(), self.parameters,
            unit=self.job.data.unit, settings=asdict(settings), skipped=[],
        )  # fmt: skip
        result.flops_per_step = flops.of_step(self.job, settings.batch)
        ceiling = flops.ceiling(settings, device)
        log = Log(settings.out, start, settings.tensorboard) if self.save and ranks.rank() == 0 else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times: list[float] = []
        lost: OSError | None = None  # why the log is not written any more
        began = time.perf_counter()
        done = start
        try:
            with interruptible(self), batches(self.job.data, start, self.steps, settings.prefetch, device) as data:
                started = time.perf_counter()  # of a step: its batch is waited for in it
                for step, (x, y) in zip(range(start, self.steps), data, strict=False):
                    figures = self.update(step, x, y, result)
                    seconds = time.perf_counter() - started
                    times.append(seconds)
                    done = step + 1
                    result.loss.append(figures["loss"])
                    count = self.job.count(y) if self.job.name == "gpt" else len(y)
                    figures |= {"step": done, "ms": seconds * 1e3, f"{result.unit}/s": count / seconds}
                    if ceiling:
                        figures["mfu"] = result.flops_per_step / seconds / (ceiling * result.ranks)
                    last = done == self.steps or self.stop
                    if last or (settings.validate_every and done % settings.validate_every == 0):
                        result.validation_loss, result.accuracy = self.validate()
                        figures |= {"validation_loss": result.validation_loss, "accuracy": result.accuracy}
                    if log and lost is None:  # before a checkpoint: a run that goes on from it lacks no row
                        try:
                            log.write(figures)
                        except OSError as error:  # all ranks end after the next step, with a checkpoint
                            lost, self.asked = error, self.asked or time.monotonic()
                    if self.save and (last or (settings.checkpoint_every and done % settings.checkpoint_every == 0)):
                        result.checkpoint = str(self.saved(done))
                    if self.on_step and ranks.rank() == 0:
                        self.on_step(done, self.steps, figures)
                    if self.stop:
                        break
                    started = time.perf_counter()
        finally:
            if log:
                log.close()
        if lost is not None:
            raise OSError(
                lost.errno,
                f"{lost.strerror}; the run ended after step {done}, its state is in '{result.checkpoint}'",
                lost.filename,
            )
        result.steps, result.interrupted, result.seconds = done, self.stop, time.perf_counter() - began
        if done == start:  # nothing was left to do
            result.validation_loss, result.accuracy = self.validate()
        if times:
            typical = statistics.median(times[STARTING:] or times)
            result.step_ms = typical * 1e3
            per_step = settings.batch * (self.job.data.length if self.job.name == "gpt" else 1)
            result.rate = per_step / typical
            if ceiling:
                result.mfu = result.flops_per_step / typical / (ceiling * result.ranks)
        if device.type == "cuda":
            result.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        return result

    def update(self, step: int, x: Tensor, y: Tensor, result: Result) -> dict[str, Any]:
        """One update from a batch on the CPU (or pinned); leaves model and optimizer alone where it is not finite.

        Each part's summed loss is divided by the targets of the whole batch, so parts and ranks of unequal counts weigh what
        they hold. DDP and FSDP take the mean over the ranks, hence the factor.
        """
        settings, device = self.settings, self.device
        for group, factor in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * learning_rate(settings.lr, step, self.steps)
        targets = self.job.count(y)
        scale = self.scaler.scale(torch.full((), self.sharing / max(targets, 1), device=device))
        mine, labels = (ranks.share(t, self.tensor).to(device, non_blocking=True) for t in (x, y))
        if getattr(settings, "channels_last", False):
            mine = mine.contiguous(memory_format=torch.channels_last)
        buffers = [b.clone() for b in self.model.buffers()]
        summed = torch.zeros((), device=device)
        parts = list(zip(mine.tensor_split(settings.accumulate), labels.tensor_split(settings.accumulate), strict=True))
        for number, (part_x, part_y) in enumerate(parts):
            with ranks.gradients(self.model, settings.parallel, last=number == len(parts) - 1):
                summed += self.forward_backward(part_x, part_y, scale)
        sums = ranks.total(summed, float(self.asked > 0), tensor=self.tensor, device=device)
        self.scaler.unscale_(self.optimizer)
        of_all: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        of_all = of_all.full_tensor() if hasattr(of_all, "full_tensor") else of_all
        loss, stopping, norm = torch.cat((sums, of_all.double()[None])).tolist()  # the one wait for the GPU
        loss, self.stop = loss / max(targets, 1), stopping > 0
        if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
            if not settings.skip_nan:
                self.not_finite(step, x, y, loss, norm)
            result.skipped.append(step)
            if self.scaler.is_enabled():
                self.scaler.update()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        return {"loss": loss, "lr": self.optimizer.param_groups[0]["lr"], "gradient_norm": norm}

    def forward_backward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """Adds the gradients of a part; its summed loss, ``[]``."""
        if self.settings.cuda_graph:
            if self.graph is None:
                self.graph = techniques.Graph(self.plain, self.model, scale, x, y)
            if x.shape == self.graph.x.shape:
                return self.graph(x, y, scale)
        return self.plain(x, y, scale)

    def plain(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        with techniques.autocast(self.settings, self.device):
            loss = self.model(x, y)[0]
        (loss * scale).backward()
        return loss.detach()

    def not_finite(self, step: int, x: Tensor, y: Tensor, loss: float, norm: float) -> None:
        """Saves the state before the step and its batch, and raises NotFinite."""
        where = ""
        if self.save:
            folder = Path(self.settings.out, "not-finite", f"step-{step:08d}")
            try:
                checkpoint.save(folder, self.model, self.optimizer, self.facts(step))
                if ranks.rank() == 0:
                    torch.save({"x": x, "y": y}, folder / "batch.pt")
                where = f"; the state before it and the batch are in '{folder}'"
            except (OSError, RuntimeError) as error:  # torch.save says RuntimeError
                where = f"; they could not be saved in '{folder}': {str(error).splitlines()[0]}"
        per_epoch = self.job.data.steps_per_epoch
        raise NotFinite(
            f"step {step + 1}: loss {loss}, gradient norm {norm} "
            f"(batch {step % per_epoch + 1} of epoch {step // per_epoch + 1}){where}. "
            "--skip-nan leaves such steps out; a smaller --lr may avoid them"
        )

    @torch.no_grad()
    def validate(self) -> tuple[float | None, float | None]:
        """Mean loss of the held-out targets, and the share of images that are right."""
        ranks.average_buffers(self.model)
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, right, targets
        for x, y in self.job.data.held_out():
            x, y = (ranks.share(t, self.tensor).to(self.device) for t in (x, y))
            if getattr(self.settings, "channels_last", False):
                x = x.contiguous(memory_format=torch.channels_last)
            with techniques.autocast(self.settings, self.device):
                loss, right = self.model(x, y)
            sums += torch.stack(
                [loss.double(), (loss * 0 if right is None else right).double(), (y >= 0).sum().double()]
            )
        self.model.train()
        loss_sum, right_sum, targets = ranks.total(*sums, tensor=self.tensor, device=self.device).tolist()
        if not targets:
            return None, None
        return loss_sum / targets, right_sum / targets if self.job.name == "cnn" else None

    def facts(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "steps": self.steps,
            "began": self.began,
            "jobs": self.jobs,
            "job": self.job.name,
            "model": {"job": self.job.name, **self.job.model},
            "scaler": self.scaler.state_dict(),
            "settings": asdict(self.settings),
        }

    def saved(self, step: int) -> Path:
        ranks.average_buffers(self.model)
        folder = Path(self.settings.out, "checkpoints", f"step-{step:08d}")
        checkpoint.save(folder, self.model, self.optimizer, self.facts(step))
        return folder

    def started_again(self) -> bool:
        """Whether this job of ``weft launch`` has left a checkpoint of these settings, before its ranks or a scheduler's job
        were started again."""
        return bool(self.jobs) and self.last(self.of_this_job) is not None

    def of_this_job(self, facts: dict[str, Any]) -> bool:
        there, here = facts.get("settings", {}), asdict(self.settings)
        return not set(self.jobs).isdisjoint(facts.get("jobs", ())) and there | {"resume": here["resume"]} == here

    def last(self, where: Callable[[dict[str, Any]], bool]) -> Path | None:
        """The newest checkpoint, as rank 0 sees it."""
        return ranks.of_first(checkpoint.newest(self.settings.out, where))

    def resumed(self) -> int:
        """Reads this job's newest checkpoint, or else the newest one; the step at which the run goes on."""
        found = self.last(self.of_this_job) or self.last(lambda facts: True)
        if found is None:
            raise FileNotFoundError(f"no checkpoint in '{Path(self.settings.out, 'checkpoints')}' to resume from")
        facts = checkpoint.load(found, self.model, self.optimizer, {"job": self.job.name, **self.job.model})
        if facts["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(facts["scaler"])
        for name in ("seed", "batch"):
            there, here = facts["settings"][name], getattr(self.settings, name)
            if there != here:
                raise ValueError(
                    f"checkpoint '{found}' was made with {name}={there}, this run has {here}: its order differs"
                )
        self.began = facts.get("began", self.began)
        return int(facts["step"])


def learning_rate(most: float, step: int, steps: int) -> float:
    """Rises linearly, then falls to nothing as a cosine."""
    rise = max(1, round(steps * WARM_UP))
    if step < rise:
        return most * (step + 1) / rise
    return most * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@contextmanager
def batches(
    data: Any, start: int, stop: int, prefetch: bool, device: torch.device
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """The batches of the steps from ``start`` on; with ``prefetch`` each is made, and pinned for a GPU, while the one before it
    trains."""

    def made(step: int) -> Batch:
        x, y = data.batch(step)
        return (x.pin_memory(), y.pin_memory()) if prefetch and device.type == "cuda" else (x, y)

    if not prefetch:
        yield map(made, range(start, stop))
        return

    def ahead(pool: ThreadPoolExecutor) -> Iterator[Batch]:
        coming = pool.submit(made, start) if start < stop else None
        for step in range(start, stop):
            assert coming is not None
            batch = coming.result()
            if step + 1 < stop:
                coming = pool.submit(made, step + 1)
            yield batch

    with ThreadPoolExecutor(1) as pool:
        yield ahead(pool)


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the step in flight, with a checkpoint; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if run.asked and time.monotonic() - run.asked > 1:  # torchrun sends its own after the terminal's
            raise KeyboardInterrupt
        run.asked = run.asked or time.monotonic()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
