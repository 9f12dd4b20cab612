# rejected at: right
# Takes the address in bytes for the number of the word.
def conflicts(addresses):
    words = {address for address in addresses}
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks) - 1


def padded(columns):
    return columns | 1


def swizzled(row, column):
    return column ^ row
