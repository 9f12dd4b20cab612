"""
[en
Three commands, as texts. Nothing is run: the check reads them as a shell would. The lesson has what you need.

You rented a server: user `ada`, host 203.0.113.7, ssh on port 2222. It has 4 GPUs. Your checkout is the current folder.
en]
[zh
三条命令，写成文本。不会真的执行：检查会像 shell 那样读取它们。所需内容都在课文里。

你租了一台服务器：用户 `ada`，主机 203.0.113.7，ssh 端口 2222，有 4 块 GPU。当前目录就是你的代码目录。
zh]
"""

# I AM NOT DONE

# TODO(en): print what scripts/remote_setup.sh would do on that server, without doing it. ssh's options come after the host.
# TODO(zh): 打印 scripts/remote_setup.sh 会在那台服务器上做什么，但不执行。ssh 的选项写在主机之后。
# [solution
SETUP = "scripts/remote_setup.sh --dry-run ada@203.0.113.7 -p 2222"
# solution]
# [skeleton
#: SETUP = "scripts/remote_setup.sh"
# skeleton]

# TODO(en): run `python train.py` in the image pytorch/pytorch: all GPUs; the current folder as /work, which is also where it starts; more
#   shared memory than 64 MB; the container is removed afterwards.
# TODO(zh): 在镜像 pytorch/pytorch 中运行 `python train.py`：使用所有 GPU；当前目录挂载为 /work，并从那里启动；共享内存多于 64 MB；
#   结束后删除容器。
# [solution
TRAIN = 'docker run --rm --gpus all -v "$PWD":/work -w /work --ipc=host pytorch/pytorch python train.py'
# solution]
# [skeleton
#: TRAIN = "docker run pytorch/pytorch python train.py"
# skeleton]

# TODO(en): run `nvidia-smi` in the same image with the GPUs 2 and 3 alone, removed afterwards.
# TODO(zh): 在同一镜像中只用 2 号和 3 号 GPU 运行 `nvidia-smi`，结束后删除容器。
# [solution
TWO_GPUS = """docker run --rm --gpus '"device=2,3"' pytorch/pytorch nvidia-smi"""
# solution]
# [skeleton
#: TWO_GPUS = "docker run --gpus all pytorch/pytorch nvidia-smi"
# skeleton]
