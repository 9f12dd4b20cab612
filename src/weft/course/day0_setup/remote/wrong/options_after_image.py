# rejected at: right
# What follows the image is the command.
SETUP = "scripts/remote_setup.sh --dry-run ada@203.0.113.7 -p 2222"


TRAIN = 'docker run pytorch/pytorch --rm --gpus all -v "$PWD":/work -w /work --ipc=host python train.py'


TWO_GPUS = """docker run --rm --gpus '"device=2,3"' pytorch/pytorch nvidia-smi"""
