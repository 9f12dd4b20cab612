# rejected at: right
# The container's folder first.
SETUP = "scripts/remote_setup.sh --dry-run ada@203.0.113.7 -p 2222"


TRAIN = 'docker run --rm --gpus all -v /work:"$PWD" -w /work --ipc=host pytorch/pytorch python train.py'


TWO_GPUS = """docker run --rm --gpus '"device=2,3"' pytorch/pytorch nvidia-smi"""
