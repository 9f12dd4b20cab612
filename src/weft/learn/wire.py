"""Messages between the checker and the learner's process: JSON and raw buffers, never pickles.

So nothing that the learner's process sends can run code in the checker, and a result is data, whatever class it had there.
Values are None, booleans, numbers, strings, lists, tuples, dicts, NumPy arrays and PyTorch tensors (with their strides);
anything else stays in the learner's process, and a number stands for it.
"""

import json
import struct
import sys
from collections.abc import Callable
from socket import socket
from typing import Any

Hold = Callable[[Any], int]  # keeps an object, and returns its number


class Held:
    """An object that stays in the learner's process."""

    def __init__(self, number: int, type_name: str) -> None:
        self.number, self.type_name = number, type_name


def send(to: socket, value: Any, hold: Hold | None = None) -> None:
    buffers: list[bytes] = []
    head = json.dumps([_packed(value, buffers, hold), [len(b) for b in buffers]]).encode()
    to.sendall(struct.pack("<Q", len(head)) + head + b"".join(buffers))


def same(value: Any, other: Any) -> bool:
    """Whether two values are the same as data, bit by bit: NaN is the same as that NaN."""
    one: list[bytes] = []
    two: list[bytes] = []
    return json.dumps(_packed(value, one, None)) == json.dumps(_packed(other, two, None)) and one == two


def receive(of: socket, held: Callable[[int], Any] | None = None) -> Any:
    """The next message.

    Raises:
        EOFError: The other side is gone.
    """
    (size,) = struct.unpack("<Q", _exactly(of, 8))
    value, sizes = json.loads(_exactly(of, size))
    return _unpacked(value, [_exactly(of, n) for n in sizes], held)


def _exactly(of: socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while size:
        got = of.recv_into(view[-size:], size)
        if not got:
            raise EOFError("the other process is gone")
        size -= got
    return data


def _packed(value: Any, buffers: list[bytes], hold: Hold | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind in (list, tuple):
        return {kind.__name__: [_packed(v, buffers, hold) for v in value]}
    if kind is dict:
        return {"dict": [[_packed(k, buffers, hold), _packed(v, buffers, hold)] for k, v in value.items()]}
    if kind is Held:
        return {"held": value.number, "type": value.type_name}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.array(value, order="C")
        buffers.append(array.tobytes())
        return {"numpy": array.dtype.str, "shape": array.shape, "buffer": len(buffers) - 1}
    if torch and kind in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        return _packed_tensor(value, buffers, torch)
    if torch and kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if hold is None:
        raise TypeError(f"a {kind.__name__} cannot be sent to the learner's process")
    return {"held": hold(value), "type": kind.__name__}


def _packed_tensor(x: Any, buffers: list[bytes], torch: Any) -> dict[str, Any]:
    flat = x.detach().resolve_conj().resolve_neg()
    span = 1 + sum((n - 1) * s for n, s in zip(flat.shape, flat.stride(), strict=True)) if flat.numel() else 0
    flat = flat.as_strided((span,), (1,)).cpu()
    buffers.append(flat.view(torch.uint8).numpy().tobytes() if span else b"")
    return {
        "torch": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "stride": list(x.stride()),
        "grad": x.requires_grad,
        "device": x.device.type,
        "buffer": len(buffers) - 1,
    }


def _unpacked(value: Any, buffers: list[bytearray], held: Callable[[int], Any] | None) -> Any:
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "list" in value:
        return [_unpacked(v, buffers, held) for v in value["list"]]
    if "tuple" in value:
        return tuple(_unpacked(v, buffers, held) for v in value["tuple"])
    if "dict" in value:
        return {_unpacked(k, buffers, held): _unpacked(v, buffers, held) for k, v in value["dict"]}
    if "held" in value:
        return held(value["held"]) if held else Held(value["held"], value["type"])
    if "numpy" in value:
        import numpy

        return numpy.frombuffer(buffers[value["buffer"]], value["numpy"]).reshape(value["shape"])
    import torch

    if "dtype" in value:
        return getattr(torch, value["dtype"])
    dtype = getattr(torch, value["torch"])
    data = buffers[value["buffer"]]
    flat = torch.empty(0, dtype=dtype)
    if data:  # a copy begins on 64 bytes, as PyTorch's allocator gives them; a buffer begins anywhere
        flat = torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype)
    if value["device"] != "cpu" and torch.cuda.is_available():
        flat = flat.to(value["device"])
    tensor = flat.as_strided(value["shape"], value["stride"])
    return tensor.requires_grad_() if value["grad"] else tensor
