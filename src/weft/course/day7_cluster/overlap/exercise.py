"""
[en
Communication that hides: gradients are summed over the ranks while backward still computes.

Backward goes through the layers from the last to the first; ``layers`` is in that order: (seconds of backward, bytes of gradients).
en]
[zh
藏起来的通信：反向还在计算时，各 rank 的梯度已经在求和。

反向从最后一层走到第一层；``layers`` 就按这个顺序排列：(反向的秒数, 梯度的字节数)。
zh]
"""

from collections.abc import Callable


# TODO(en): Return (seconds of the step, seconds of communication that is *exposed*: during which nothing computes).
#   A bucket collects the gradients of layers that are done. It is sent as soon as it holds at least ``bucket_bytes``, or after the last
#   layer with what it holds (unless it is empty). Sending a bucket of b bytes takes comm(b) seconds; buckets are sent one after
#   another, and beside the computation. The step ends when all layers are done and all buckets are sent.
# TODO(zh): 返回（一步的秒数，*暴露*的通信秒数，即没有任何计算与之重叠的部分）。
#   桶收集已完成各层的梯度。一旦装满至少 ``bucket_bytes`` 就发送；最后一层之后，剩下多少就发送多少（空的除外）。
#   发送 b 字节的桶需要 comm(b) 秒；桶一个接一个地发送，与计算同时进行。所有层算完、所有桶发完，这一步才结束。
def step(
    forward_s: float, layers: list[tuple[float, int]], bucket_bytes: int, comm: Callable[[int], float]
) -> tuple[float, float]:
    # [skeleton
    #: compute = forward_s + sum(seconds for seconds, _ in layers)
    #: sent = comm(sum(size for _, size in layers))
    #: return compute + sent, sent
    # skeleton]
    # [solution
    now = forward_s
    link_free = 0.0
    bucket = 0
    for i, (seconds, size) in enumerate(layers):
        now += seconds
        bucket += size
        if bucket and (bucket >= bucket_bytes or i == len(layers) - 1):
            link_free = max(link_free, now) + comm(bucket)
            bucket = 0
    return max(now, link_free), max(0.0, link_free - now)
    # solution]


# TODO(en): Return the one of ``sizes`` whose step is shortest; of several equal ones the largest.
# TODO(zh): 返回 ``sizes`` 中使一步最短的那个；有几个相同时取最大的。
def best_bucket(
    forward_s: float, layers: list[tuple[float, int]], sizes: list[int], comm: Callable[[int], float]
) -> int:
    # [skeleton
    #: return max(sizes)
    # skeleton]
    # [solution
    return min(sizes, key=lambda size: (step(forward_s, layers, size, comm)[0], -size))
    # solution]


# I AM NOT DONE
