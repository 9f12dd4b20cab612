# rejected at: right
# The same float, asked for by 32 lanes, is 4 bytes.
def addresses(start, stride, lanes=32):
    return [start + 4 * stride * lane for lane in range(lanes)]


def sectors(addresses):
    return len({byte // 32 for address in addresses for byte in (address, address + 3)})


def used_share(addresses):
    return 4 * len(addresses) / (32 * sectors(addresses))
