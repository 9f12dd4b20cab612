# rejected at: right
# All passes, not those beyond the first.
def conflicts(addresses):
    words = {address // 4 for address in addresses}
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks)


def padded(columns):
    return columns | 1


def swizzled(row, column):
    return column ^ row
