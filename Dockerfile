# syntax=docker/dockerfile:1
#
#     docker build -t saccade .                          for any machine
#     docker build -t saccade:cuda --target cuda .       for NVIDIA GPUs; needs their container toolkit to run
#     docker run --rm -v "$PWD:/data" saccade run street.mp4 --detect person --out found.mp4
#
# Paths are relative to /data. compose.yaml runs cameras for good.

# What the tests run with.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN python -m venv /opt/saccade
ENV PATH=/opt/saccade/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# Torch before the project, so that a change of the project does not bring it again.
FROM build AS build-cpu
ARG TORCH=torch==2.13.0
RUN --mount=type=cache,target=/root/.cache/pip pip install "$TORCH" --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install ".[mqtt]"

FROM build AS build-cuda
ARG TORCH=torch==2.13.0
# What the usual index has for Linux brings CUDA's libraries with it: nothing but the driver is the machine's.
RUN --mount=type=cache,target=/root/.cache/pip pip install "$TORCH"
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install ".[mqtt]"

FROM python:${PYTHON}-slim AS runtime
# What OpenCV links against.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home saccade \
    && install -d -o saccade -g saccade /data
ENV PATH=/opt/saccade/bin:$PATH PYTHONUNBUFFERED=1
USER saccade
WORKDIR /data
# Ctrl-C and `docker stop` end cleanly: what is written is finished.
STOPSIGNAL SIGTERM
ENTRYPOINT ["saccade"]
CMD ["--help"]

FROM runtime AS cuda
# Triton compiles the engine's kernels for the GPU it finds, and the glue around them with a C compiler.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER saccade
# `video` is for decoding and encoding on the GPU.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,video,utility TRITON_CACHE_DIR=/tmp/triton
COPY --from=build-cuda /opt/saccade /opt/saccade

# The last one is what a build without --target makes.
FROM runtime AS cpu
COPY --from=build-cpu /opt/saccade /opt/saccade
