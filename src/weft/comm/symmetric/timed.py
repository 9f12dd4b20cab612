"""What a call takes on the slowest rank, to choose between algorithms on the ranks at hand."""

import statistics
from collections.abc import Callable, Mapping

import torch

from weft.comm.group import Group

IN_GRAPH, REPLAYS = 10, 7  # calls timed in a CUDA graph, and how often


def graph_us(call: Callable[[], object], calls: int = IN_GRAPH) -> float:
    """Microseconds of a call in a CUDA graph of several; the median of replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # brings the ranks together
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / calls)
    return statistics.median(times)


def slowest_us(group: Group, candidates: Mapping[str, Callable[[], object]], calls: int = IN_GRAPH) -> dict[str, float]:
    """Microseconds of each candidate on its slowest rank: the same figures on all ranks, so all choose alike."""
    device = torch.device("cuda", torch.cuda.current_device())
    times = torch.tensor([graph_us(call, calls) for call in candidates.values()], device=device)
    group.transport.all_reduce(times, times, "max", True)
    return dict(zip(candidates, times.tolist(), strict=True))
