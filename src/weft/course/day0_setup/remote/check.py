import argparse
import re
import shlex


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def parsed(t, name, text, program):
    """The words of a command, or a message on why a shell would not take it."""
    t.require(isinstance(text, str), f"{name} is no text", f"{name} 不是文本")
    try:
        words = shlex.split(text)
    except ValueError as error:
        words = []
        t.require(False, f"{name}: a shell cannot read this: {error}", f"{name}：shell 无法读取：{error}")
    if program.startswith("scripts/"):  # also ./scripts/…, and with a shell named
        words = words[1:] if words[:1] in (["bash"], ["sh"]) else words
        words = [words[0].removeprefix("./"), *words[1:]] if words else words
    start = program.split()
    t.require(words[: len(start)] == start, f"{name} begins with `{program}`", f"{name} 应以 `{program}` 开头")
    return words[len(start) :]


def docker(t, name, text):
    words = parsed(t, name, text, "docker run")
    parser = Parser(add_help=False, allow_abbrev=False)
    for flag in ("--rm", "-i", "-t", "-it"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--gpus", "--ipc", "--shm-size", "--network", "--name"):
        parser.add_argument(flag)
    parser.add_argument("-w", "--workdir")
    parser.add_argument("-v", "--volume", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        found = parser.parse_args(words)
    except ValueError as error:
        t.require(False, f"{name}: docker would refuse this: {error}", f"{name}：docker 会拒绝：{error}")
    t.require(
        found.command[:1] == ["pytorch/pytorch"],
        f"{name}: the image follows docker's options, and the command follows the image; here the image is {found.command[:1]}",
        f"{name}：镜像写在 docker 的选项之后，命令写在镜像之后；这里的镜像是 {found.command[:1]}",
    )
    t.require(
        found.rm,
        f"{name} leaves its container behind: --rm, before the image, removes it",
        f"{name} 会留下容器：在镜像之前加 --rm 可将其删除",
    )
    return found


def check(learner, t):
    words = parsed(t, "SETUP", t.value(learner.SETUP), "scripts/remote_setup.sh")
    t.require(
        "--dry-run" in words,
        "SETUP would change the server: --dry-run prints only",
        "SETUP 会改动服务器：--dry-run 只打印",
    )
    t.require("ada@203.0.113.7" in words, "SETUP does not name ada@203.0.113.7", "SETUP 没有写出 ada@203.0.113.7")
    host = words.index("ada@203.0.113.7")
    t.require(
        words.index("--dry-run") < host,
        "SETUP: --dry-run is the script's own option and comes before the host; after it, ssh would get it",
        "SETUP：--dry-run 是脚本自己的选项，要写在主机之前；写在之后会被交给 ssh",
    )
    t.require(
        words[host + 1 :] in (["-p", "2222"], ["-p2222"]),
        "SETUP: after the host come ssh's options: its port is -p 2222",
        "SETUP：主机之后是 ssh 的选项：端口写作 -p 2222",
    )

    train = docker(t, "TRAIN", t.value(learner.TRAIN))
    t.require(
        train.gpus == "all", "TRAIN sees no GPU, or not all: --gpus all", "TRAIN 看不到 GPU，或看不到全部：--gpus all"
    )
    t.require(
        any(re.fullmatch(r"(\$PWD|\$\{PWD\}|\$\(pwd\)|\.|\./?):/work(:rw)?", v) for v in train.volume),
        "TRAIN: -v HOST:CONTAINER shares the current folder as /work",
        "TRAIN：-v 宿主机:容器 把当前目录共享为 /work",
    )
    t.require(train.workdir == "/work", "TRAIN does not start in /work: -w", "TRAIN 没有从 /work 启动：-w")
    size = re.fullmatch(r"(\d+)([kmg]?)b?", (train.shm_size or "0").lower())
    large = size and int(size[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[size[2]] > 64 * 2**20
    t.require(
        train.ipc == "host" or large,
        "TRAIN has 64 MB of shared memory: data loaders with workers need --ipc=host or --shm-size",
        "TRAIN 只有 64 MB 共享内存：带 worker 的数据加载器需要 --ipc=host 或 --shm-size",
    )
    t.equal(train.command[1:], ["python", "train.py"], "TRAIN's command")

    two = docker(t, "TWO_GPUS", t.value(learner.TWO_GPUS))
    t.require(
        (two.gpus or "").strip('"') in ("device=2,3", "device=3,2"),
        f"TWO_GPUS asks for --gpus {two.gpus}; the GPUs are named device=2,3",
        f"TWO_GPUS 请求的是 --gpus {two.gpus}；GPU 应写作 device=2,3",
    )
    t.require(
        (two.gpus or "").startswith('"'),
        "TWO_GPUS: docker splits the value at the comma; it needs double quotes inside the shell's single ones: '\"device=2,3\"'",
        "TWO_GPUS：docker 会在逗号处拆开该值；shell 的单引号里面还要有双引号：'\"device=2,3\"'",
    )
    t.equal(two.command[1:], ["nvidia-smi"], "TWO_GPUS's command")
