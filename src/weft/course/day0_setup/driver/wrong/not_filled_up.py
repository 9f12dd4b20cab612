# rejected at: right
# [580, 65] < [580, 65, 0].
def loads(driver, least):
    return [int(p) for p in driver.split(".")] >= [int(p) for p in least.split(".")]


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    fitting = [name for name, least in builds.items() if loads(driver, least)]
    return max(fitting, key=lambda name: int(name[2:]), default=None)
