"""Every public function on DTensors of two processes: PyTorch's placement rules, or a refusal that names the argument."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from every_operator import OPERATORS, drawn, middling
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.bench import cases

REFUSED = {
    "weight_only_matmul", "grouped_matmul", "moe_feed_forward", "route_top_k", "permute_tokens", "combine_tokens", "bsr_matmul",
    "prune_2_4", "sparse_2_4_matmul", "spmm", "spmv",
    "decode_attention", "paged_decode_attention", "append_to_cache", "append_and_attend",
}  # fmt: skip
# PyTorch itself refuses: rows that do not split evenly, flattened rows, the gradient of torch.cumprod
PYTORCHS = {"linear_quantized", "cross_entropy", "cross_entropy_with_gradient", "cumprod"}
# and operators for which an earlier PyTorch (2.11, not 2.13) has no rule
RULES_CAME_LATER = {"group_norm", "cumprod", "cumsum", "logcumsumexp"} if torch.__version__ < (2, 13) else set()


def placed(value, mesh, first: bool):
    """A tensor distributed: the first argument sharded by rows with ``first``, all others replicated."""
    if not isinstance(value, torch.Tensor):
        return value
    how = Shard(0) if first and value.ndim > 1 and value.shape[0] > 1 else Replicate()
    return distribute_tensor(value, mesh, [how], src_data_rank=None)


def check(op, mesh, sharded: bool) -> None:
    w = middling(op)
    arguments, plain = drawn(op, w, device="cpu"), drawn(op, w, device="cpu")
    first = next((name for name, value in arguments.items() if isinstance(value, torch.Tensor)), None)
    given = {name: placed(value, mesh, sharded and name == first) for name, value in arguments.items()}
    outs = list(cases.tensors(op.public(**given)))
    for out, right in zip(outs, cases.tensors(op.reference(**plain)), strict=True):
        assert isinstance(out, DTensor), "a plain tensor came back"
        torch.testing.assert_close(out.full_tensor().float(), right.float(), rtol=1e-3, atol=1e-3, equal_nan=True)
    if "backward" not in op.directions:
        return
    leaves = [given[name].detach().requires_grad_() for name in op.differentiable if isinstance(given[name], DTensor)]
    names = [name for name in op.differentiable if isinstance(given[name], DTensor)]
    outs = [t for t in cases.tensors(op.public(**given | dict(zip(names, leaves, strict=True)))) if t.requires_grad]
    mine = torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs])
    whole = [plain[name].requires_grad_() for name in names]
    outs = [t for t in cases.tensors(op.reference(**plain)) if t.requires_grad]
    for got, right in zip(mine, torch.autograd.grad(outs, whole, [torch.ones_like(t) for t in outs]), strict=True):
        torch.testing.assert_close(got.full_tensor(), right, rtol=1e-3, atol=1e-3, equal_nan=True)


def process(rank: int, place: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(place, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    failed = []
    for op in OPERATORS:
        if op.predicted is not None or not any(
            isinstance(v, torch.Tensor) for v in drawn(op, middling(op), device="cpu").values()
        ):
            continue
        for sharded in (False, True):
            try:
                check(op, mesh, sharded)
                problem = f"{op.name} is not refused" if op.name in REFUSED else ""
            except Exception as error:
                refused = op.name in REFUSED and isinstance(error, TypeError) and "is a DTensor" in str(error)
                pytorchs = (
                    op.name in PYTORCHS
                    and isinstance(error, RuntimeError)
                    and not isinstance(error, NotImplementedError)
                )
                pytorchs |= op.name in RULES_CAME_LATER and "does not have a sharding strategy" in str(error)
                problem = (
                    "" if refused or pytorchs else f"{op.name}, {sharded=}: {type(error).__name__}: {str(error)[:300]}"
                )
            failed += [problem] if problem else []
    if rank == 0:
        sys.stderr.write("\n".join(failed))
        sys.stderr.flush()
    store.set(f"done by {rank}", "")
    store.wait(["done by 0", "done by 1"])
    os._exit(1 if failed else 0)  # Gloo's threads outlive the group, and may not find the interpreter gone


if __name__ == "__main__":
    # forked, they need not import everything again
    torch.multiprocessing.start_processes(process, (sys.argv[1],), 2, start_method="fork")
