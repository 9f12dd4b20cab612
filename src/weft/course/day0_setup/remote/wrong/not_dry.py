# rejected at: right
# It changes the server.
SETUP = "scripts/remote_setup.sh ada@203.0.113.7 -p 2222"


TRAIN = 'docker run --rm --gpus all -v "$PWD":/work -w /work --ipc=host pytorch/pytorch python train.py'


TWO_GPUS = """docker run --rm --gpus '"device=2,3"' pytorch/pytorch nvidia-smi"""
