"""The program, compiled by the host's C++ compiler with ``runtime.hpp``: results, failing calls, leaks, blocks, bytes."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime.hpp"
LAUNCH = re.compile(r"\b(\w+)\s*<<<(.*?)>>>\s*\(", re.S)


def built(t, folder):
    compiler = shutil.which("g++") or shutil.which("c++")
    t.require(
        compiler, "this needs a C++ compiler: sudo apt install g++", "需要 C++ 编译器：sudo apt install g++", "run"
    )
    source = LAUNCH.sub(r"weft::launch(\1, \2, ", t.source(".cu"))
    (folder / "exercise.cu").write_text(source, encoding="utf-8")
    words = [compiler, "-std=c++17", "-x", "c++", "-include", str(RUNTIME), "exercise.cu", "-o", "program"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if "error" in line][:5]
    said = "\n".join(errors).replace("exercise.cu:", "line ")
    t.require(done.returncode == 0, f"does not compile:\n{said}", f"无法编译：\n{said}", "parse")
    return folder / "program"


def run(t, program, values, factor, fails=""):
    """(exit status, what it printed, its last error line, how it ended, allocations left, launches, blocks, bytes copied, kernels
    not waited for)."""
    report, printed = program.parent / "report", program.parent / "printed"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "WEFT_REPORT": str(report), "WEFT_FAILS": fails}
    text = f"{len(values)} {factor}\n" + " ".join(map(str, values))
    limit = f"ulimit -f 2048; exec {program}"  # a program that prints for ever is stopped at 1 or 2 MiB
    try:
        with printed.open("w") as file:
            words = ["sh", "-c", limit]
            done = subprocess.run(
                words,
                input=text,
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=10,
                env=environment,
            )
    except subprocess.TimeoutExpired:
        t.require(False, "the program did not end within 10 s", "程序 10 秒内没有结束", "run")
    end, *counts = report.read_text().split() if report.exists() else ["crash", *"00000"]
    said = (done.stderr.strip().splitlines() or [""])[-1][:200]
    return done.returncode, printed.read_text(errors="replace").split(), said, end, *map(int, counts)


def check(learner, t):
    with tempfile.TemporaryDirectory(prefix="weft-learn-") as folder:
        program = built(t, Path(folder))
        for n in (t.integers(3, 250), 256, t.integers(257, 3000)):
            values, factor = t.rng.integers(-99, 99, n).tolist(), t.integers(2, 9)
            status, got, said, end, left, launches, blocks, copied, waiting = run(t, program, values, factor)
            what = f"the output for {n} numbers"
            t.require(end != "host", "the host touched device memory", "主机碰了设备内存", "run")
            t.require(
                end != "kernel", "the kernel accessed memory beyond its array", "核函数访问了数组之外的内存", "safe"
            )
            t.require(
                end == "end" and status == 0,
                f"{what}: the program ended with status {status} {said}",
                f"程序以状态 {status} 结束 {said}",
                "run",
            )
            t.equal(got, [f"{v * factor:g}" for v in values], what)
            t.require(
                launches == 1 and not waiting, f"{launches} launches; 1 is expected", f"启动了 {launches} 次；应为 1 次"
            )
            t.require(left == 0, f"{left} allocations were not freed", f"有 {left} 次分配没有释放", "safe")
        for call in ("cudaMalloc", "cudaMemcpy", "launch"):
            status, got, _, end, left, *_ = run(t, program, [1, 2, 3], 2, call)
            t.require(
                end == "end" and status == 1 and not got,
                f"{call} failed, and the program went on: status {status}, {len(got)} numbers printed",
                f"{call} 失败后程序继续运行：状态 {status}，打印了 {len(got)} 个数",
            )
            t.require(left == 0, f"{call} failed, and memory was not freed", f"{call} 失败时内存没有释放", "safe")
        t.at_most(
            blocks, -(-n // 256), f"blocks of 256 threads for {n} elements", f"处理 {n} 个元素的线程块数（256 个线程）"
        )
        t.at_most(copied, 8 * n, "bytes copied", "拷贝的字节数")
