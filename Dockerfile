# weft in a container, for two targets:
#   docker build --target cpu -t weft:cpu .
#   docker build --target cuda -t weft:latest .    # an NVIDIA driver comes from the host's container toolkit
# Versions are pinned, here and in constraints.txt (which hadolint does not see); the packages of PyTorch bring CUDA's libraries, so the base needs none.
FROM python:3.12.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/weft
ENV PATH=/opt/weft/bin:$PATH
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN pip install --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --constraint constraints.txt '.[train,cluster,learn,telemetry,deploy,kubernetes]'

FROM build AS build-cuda
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# hadolint ignore=DL3013
RUN pip install --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --constraint constraints.txt '.[gpu,train,cluster,learn,telemetry,deploy,kubernetes]'

FROM python:3.12.11-slim-bookworm AS runtime
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 WEFT_CACHE=/tmp/weft-cache
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin weft
WORKDIR /home/weft
USER 1000
ENTRYPOINT ["weft"]
CMD ["doctor"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/weft /opt/weft

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 0
# Triton compiles its launcher with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 1000
COPY --from=build-cuda /opt/weft /opt/weft
