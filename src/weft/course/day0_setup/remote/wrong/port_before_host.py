# rejected at: right
# ssh's options come after the host.
SETUP = "scripts/remote_setup.sh --dry-run -p 2222 ada@203.0.113.7"


TRAIN = 'docker run --rm --gpus all -v "$PWD":/work -w /work --ipc=host pytorch/pytorch python train.py'


TWO_GPUS = """docker run --rm --gpus '"device=2,3"' pytorch/pytorch nvidia-smi"""
