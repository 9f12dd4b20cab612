# rejected at: right
# Two parts as a float: 525.105 < 525.60.
def loads(driver, least):
    return float(".".join(driver.split(".")[:2])) >= float(".".join(least.split(".")[:2]))


def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


def newest(driver, builds):
    fitting = [name for name, least in builds.items() if loads(driver, least)]
    return max(fitting, key=lambda name: int(name[2:]), default=None)
