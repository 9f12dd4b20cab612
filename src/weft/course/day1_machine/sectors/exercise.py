"""
[en
The 32 lanes of a warp load one 4-byte float each. Memory moves whole *sectors* of 32 bytes, which begin at multiples of 32.

    lanes side by side, aligned:     |████████|████████|████████|████████|      4 sectors for 128 bytes: all of it is used
    every second float:              |█ █ █ █ |█ █ █ █ | … 8 sectors            half of it is used

Fill in the three functions. Addresses are in bytes.
en]
[zh
一个 warp 的 32 个通道各加载一个 4 字节的 float。内存以整个*扇区*（sector）为单位搬动，每个 32 字节，从 32 的倍数处开始。

    通道相邻且对齐：                 |████████|████████|████████|████████|      128 字节用 4 个扇区：全部有用
    隔一个取一个：                   |█ █ █ █ |█ █ █ █ | … 8 个扇区             一半有用

填写三个函数。地址以字节计。
zh]
"""

# I AM NOT DONE


def addresses(start, stride, lanes=32):
    # TODO(en): the byte address of each lane's float, a list. Lane 0 is at byte `start`; `stride` is in floats, and may be 0.
    # TODO(zh): 各通道的 float 的字节地址，返回列表。通道 0 位于字节 `start`；`stride` 以 float 计，可以为 0。
    # [solution
    return [start + 4 * stride * lane for lane in range(lanes)]
    # solution]
    # [skeleton
    #: return [start + lane for lane in range(lanes)]
    # skeleton]


def sectors(addresses):
    # TODO(en): how many sectors these loads move. A float may begin in one sector and end in the next. Sectors that several lanes need
    #   move once.
    # TODO(zh): 这些加载要搬动多少个扇区。一个 float 可能始于一个扇区、终于下一个。多个通道需要的同一扇区只搬一次。
    # [solution
    return len({byte // 32 for address in addresses for byte in (address, address + 3)})
    # solution]
    # [skeleton
    #: return len(addresses)
    # skeleton]


def used_share(addresses):
    # TODO(en): different bytes that the lanes asked for, divided by the bytes that moved.
    # TODO(zh): 各通道要求的不同字节数，除以搬动的字节数。
    # [solution
    asked = {address + byte for address in addresses for byte in range(4)}
    return len(asked) / (32 * sectors(addresses))
    # solution]
    # [skeleton
    #: return 1.0
    # skeleton]
