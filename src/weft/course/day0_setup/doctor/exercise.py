"""
[en
Run `weft doctor` in a terminal and read it. Then `weft doctor --json`: the same as data, in this form:

    {"findings": [{"name": "nvidia-driver", "status": "fail", "found": "…", "fix": "sudo …", "group": "GPU"}, …]}

A status is "pass", "warn" or "fail". A failure stops you; a warning may not concern you; both come with a fix.
en]
[zh
在终端运行 `weft doctor` 并阅读结果。再运行 `weft doctor --json`：同样的内容，以数据的形式：

    {"findings": [{"name": "nvidia-driver", "status": "fail", "found": "…", "fix": "sudo …", "group": "GPU"}, …]}

状态是 "pass"、"warn" 或 "fail"。失败会让你停下；警告可能与你无关；两者都附有修复办法。
zh]
"""

# [solution
import os

# solution]

# I AM NOT DONE

# TODO(en): the number of CPUs in the line `operating-system` of your `weft doctor`.
# TODO(zh): 你的 `weft doctor` 中 `operating-system` 一行里的 CPU 数。
# [solution
CPUS = os.cpu_count()
# solution]
# [skeleton
#: CPUS = None
# skeleton]


def to_do(report):
    # TODO(en): the fixes in the order in which to do them: of all failures first, then of all warnings, each group in the report's
    #   order. A finding without a fix (an empty text) gives none. `report` is the JSON document above, as a dict.
    # TODO(zh): 按应执行的顺序返回修复办法：先是所有失败的，再是所有警告的，各自保持报告中的顺序。没有修复办法（空字符串）的不返回。
    #   `report` 是上面的 JSON 文档，类型为 dict。
    # [solution
    return [
        finding["fix"]
        for status in ("fail", "warn")
        for finding in report["findings"]
        if finding["status"] == status and finding["fix"]
    ]
    # solution]
    # [skeleton
    #: return []
    # skeleton]
