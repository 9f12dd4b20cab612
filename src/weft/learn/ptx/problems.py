"""What is wrong with a kernel, in words: ``line`` is of its source; a thread is a Text such as ``(3) of block (1)``."""

from weft.learn.language import Text

VERBS = {
    "read": Text("reads", "读取"),
    "write": Text("writes", "写入"),
    "atomic": Text("changes atomically", "原子地修改"),
}


def outside(line: int, thread: Text, what: str, place: Text) -> Text:
    verb = VERBS[what]
    return Text(
        f"line {line}: thread {thread.en} {verb.en} {place.en}", f"第 {line} 行：线程 {thread.zh} {verb.zh} {place.zh}"
    )


def no_memory() -> Text:
    return Text("memory that no pointer leads to", "没有指针指向的内存")


def shared_byte(offset: int, size: int) -> Text:
    return Text(
        f"byte {offset} of shared memory, which has {size}", f"共享内存的第 {offset} 字节，而它只有 {size} 字节"
    )


def array_element(name: str, at: int, n: int) -> Text:
    return Text(f"{name}[{at}]; {name} has {n} elements", f"{name}[{at}]；{name} 只有 {n} 个元素")


def misaligned(line: int, thread: Text, size: int, offset: int, name: str) -> Text:
    return Text(
        f"line {line}: thread {thread.en} accesses {size} bytes at byte {offset} of {name}: not a multiple of {size}; "
        "a GPU stops with 'misaligned address'",
        f"第 {line} 行：线程 {thread.zh} 在 {name} 的第 {offset} 字节处访问 {size} 字节：不是 {size} 的倍数；"
        "GPU 会以 'misaligned address' 终止",
    )


def written_at_once(line: int, one: Text, other: Text, element: str) -> Text:
    return Text(
        f"line {line}: threads {one.en} and {other.en} write {element} at once: a race",
        f"第 {line} 行：线程 {one.zh} 与 {other.zh} 同时写 {element}：竞争（race）",
    )


def race(line: int, thread: Text, what: str, element: str, other: Text | None, before: str, line_before: int) -> Text:
    """``other`` accessed the element before; None: several threads did."""
    verb, verb_before = VERBS[what], VERBS[before]
    en, zh = (f"thread {other.en}", f"线程 {other.zh}") if other else ("several threads", "多个线程")
    return Text(
        f"line {line}: thread {thread.en} {verb.en} {element}, which {en} accessed at line {line_before} ({before}), "
        "and nothing orders the two: a race",
        f"第 {line} 行：线程 {thread.zh} {verb.zh} {element}，而{zh}在第 {line_before} 行访问过它（{verb_before.zh}），"
        "两者之间没有次序：竞争（race）",
    )


def different_barriers(lines: list[int]) -> Text:
    listed = ", ".join(map(str, lines))
    return Text(
        f"threads of a block wait at different barriers (lines {listed}): __syncthreads() must be reached by all threads "
        "of the block",
        f"同一线程块的线程停在不同的屏障（第 {listed} 行）：线程块的所有线程都必须到达同一个 __syncthreads()",
    )


def left_before_barrier(line: int, waits: int, gone: int) -> Text:
    return Text(
        f"line {line}: thread {waits} waits in __syncthreads(), and thread {gone} of its block has ended: all must reach it",
        f"第 {line} 行：线程 {waits} 在 __syncthreads() 处等待，而同一线程块的线程 {gone} 已经结束：所有线程都必须到达",
    )


def lanes_never_come(line: int, thread: int) -> Text:
    return Text(
        f"line {line}: a warp's threads wait for lanes that the mask names and that never come (thread {thread})",
        f"第 {line} 行：warp 的线程在等待掩码中指定、却永远不会到达的通道（线程 {thread}）",
    )


def absent_lane(line: int, thread: Text, lane: int) -> Text:
    return Text(
        f"line {line}: thread {thread.en} reads lane {lane}, which does not take part in the shuffle",
        f"第 {line} 行：线程 {thread.zh} 读取通道 {lane}，而它没有参与这次 shuffle",
    )
