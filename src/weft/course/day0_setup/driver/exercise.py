"""
[en
A CUDA program (PyTorch is one) needs a driver at least as new as its CUDA version asks. A newer driver is always fine.

    build    least driver
    cu126    525.60.13
    cu130    580.65.06

Versions are compared part by part, as numbers: 525.105.17 is newer than 525.60.13, although "525.105" < "525.60" as text.
en]
[zh
CUDA 程序（PyTorch 就是一个）需要驱动不低于其 CUDA 版本的要求。更新的驱动总是可以的。

    构建     最低驱动
    cu126    525.60.13
    cu130    580.65.06

版本要按段、作为数字比较：525.105.17 比 525.60.13 新，尽管作为文本 "525.105" < "525.60"。
zh]
"""

# I AM NOT DONE


def loads(driver, least):
    # TODO(en): whether a driver of version `driver` loads a build that needs `least`. Both are texts such as "535.183.01" or "580.65".
    # TODO(zh): 版本为 `driver` 的驱动能否加载要求 `least` 的构建。两者都是形如 "535.183.01" 或 "580.65" 的文本。
    # [solution
    return _numbers(driver) >= _numbers(least)
    # solution]
    # [skeleton
    #: return driver >= least
    # skeleton]


# [solution
def _numbers(version):
    parts = [int(part) for part in version.split(".")]
    return parts + [0] * (3 - len(parts))


# solution]
def newest(driver, builds):
    # TODO(en): the name of the build with the highest CUDA version that the driver loads; None when there is none. `builds` maps a name
    #   ("cu126" is CUDA 12.6, "cu130" 13.0: the last digit is the minor version) to its least driver.
    # TODO(zh): 返回驱动能加载的 CUDA 版本最高的构建名；没有则返回 None。`builds` 把名字（"cu126" 是 CUDA 12.6，"cu130" 是 13.0：
    #   末位是次版本号）映射到最低驱动。
    # [solution
    fitting = [name for name, least in builds.items() if loads(driver, least)]
    return max(fitting, key=lambda name: int(name[2:]), default=None)
    # solution]
    # [skeleton
    #: return None
    # skeleton]
