"""A first real training job: a small convolutional network learns handwritten digits.

The data are scikit-learn's digits: 1797 scanned digits of 8×8 pixels with 17 grey levels (a test part of the UCI set
"Optical Recognition of Handwritten Digits"). They come inside the package, so nothing is downloaded. A fifth of the
images is held out before training and only ever used to measure.

Shape letters: B images in a batch, C channels, 8×8 pixels, 10 classes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from weft import records

INSTALL = "pip install 'weft[gpu,train]'"
HELD_OUT = 1 / 5  # share of the images that training never sees


@dataclass
class TrainingRun:
    """What one training run was, and what it reached. The lists have one entry an epoch.

    ``train_loss`` is the mean over the epoch's batches while the weights change; ``test_loss`` and ``test_accuracy``
    (0 … 1) are taken on the held-out images after the epoch; ``seconds`` is the time of the training steps alone.
    """

    job: str
    device: str
    hardware: str
    seed: int
    epochs: int
    batch_size: int
    learning_rate: float
    parameters: int
    train_images: int
    test_images: int
    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images_per_second: float = 0.0  # of the median epoch: the first one also pays for starting up
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    time: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def digits(seed: int) -> tuple[Any, Any, Any, Any]:
    """The data, shuffled by the seed and split: images ``[B, 1, 8, 8]`` in 0 … 1 and labels ``[B]``, training first.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; the message has the install line.
    """
    import torch

    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"the digits images come with scikit-learn: {INSTALL}", name="sklearn") from missing

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # [B, 1, 8, 8]
    labels = torch.tensor(data.target, dtype=torch.int64)  # [B]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = round(len(labels) * HELD_OUT)
    test, rest = order[:held_out], order[held_out:]
    return images[rest], labels[rest], images[test], labels[test]


def network() -> Any:
    """Two convolutions, the second halving the image by its stride, then two linear layers; about 151 000 weights.

    There is no pooling layer: a stride does the same here, and its gradient is deterministic on a GPU too. With batch
    normalisation the network tolerates a learning rate five times as high.
    """
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),  # [B, 32, 8, 8]
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=2),  # [B, 64, 4, 4]
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),  # [B, 1024]
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),  # [B, 10]: one score for each digit
    )


def shifted(images: Any, generator: Any) -> Any:
    """The images ``[B, 1, 8, 8]`` moved by up to one pixel each way, all alike: a digit stays the same digit."""
    import torch
    from torch.nn.functional import pad

    down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
    return pad(images, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]


def train(
    device: str = "cpu",
    epochs: int = 15,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
    *,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
) -> TrainingRun:
    """Trains the network from random weights and measures it on the held-out images after each epoch.

    The learning rate rises to ``learning_rate`` and falls to nothing over the run (one cycle).

    The same seed on the same machine gives the same losses: split, weights, order and shifts follow from it, and cuDNN
    is held to its deterministic algorithms. The caller's random state is left as it was.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        epochs: passes over the training images, at least 1.
        on_step: called after each step with (steps done, steps in all), for a progress bar.

    Raises:
        ModuleNotFoundError: PyTorch or scikit-learn is not installed; the message has the install line.
        ValueError: no such device here, or fewer than one epoch or one image in a batch.
    """
    try:
        import torch
        import torch.nn.functional as F
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"training needs PyTorch: {INSTALL}", name="torch") from missing

    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise ValueError(f"device is '{device}'; expected cpu, cuda or cuda:N")
    target = torch.device(device)
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is '{device}', but PyTorch sees {torch.cuda.device_count()} GPUs; use device='cpu'")
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs={epochs} and batch_size={batch_size}; expected at least 1 of each")

    def finished() -> float:
        """The time at which the device has finished all queued work."""
        if target.type == "cuda":
            torch.cuda.synchronize(target)
        return time.perf_counter()

    train_x, train_y, test_x, test_y = (part.to(target) for part in digits(seed))
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU: the same ones for every device
        torch.default_generator.manual_seed(seed)
        model = network().to(target)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps_in_all = epochs * -(-len(train_y) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps_in_all)
    generator = torch.Generator().manual_seed(seed)
    on_gpu = target.type == "cuda"
    hardware = torch.cuda.get_device_name(target) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    run = TrainingRun(
        job="digits CNN",
        device=target.type,
        hardware=hardware,
        seed=seed,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        parameters=sum(weight.numel() for weight in model.parameters()),
        train_images=len(train_y),
        test_images=len(test_y),
        versions=_versions(),
        commit=records.commit(),
        time=records.now(),
    )

    steps = 0
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        for _ in range(epochs):
            model.train()
            started = finished()
            order = torch.randperm(len(train_y), generator=generator).to(target)
            total = torch.zeros((), device=target)  # summed on the device: reading it each step would make the GPU wait
            for batch in order.split(batch_size):
                loss = F.cross_entropy(model(shifted(train_x[batch], generator)), train_y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.detach() * len(batch)
                steps += 1
                if on_step is not None:
                    on_step(steps, steps_in_all)
            run.seconds.append(finished() - started)
            run.train_loss.append(total.item() / len(train_y))

            model.eval()
            with torch.no_grad():
                scores = model(test_x)  # [B, 10]
                run.test_loss.append(F.cross_entropy(scores, test_y).item())
                run.test_accuracy.append((scores.argmax(dim=1) == test_y).float().mean().item())

    run.images_per_second = len(train_y) / statistics.median(run.seconds)
    return run


def _versions() -> dict[str, str]:
    import sklearn
    import torch

    return {"torch": torch.__version__, "scikit-learn": sklearn.__version__}
