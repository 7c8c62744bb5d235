#     docker build -t saccade .                          for any machine
#     docker build -t saccade:cuda --target cuda .       for NVIDIA GPUs; needs their container toolkit to run
#     docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" saccade run street.mp4 --detect person --out found.mp4
#
# Paths are relative to /data. --user: files in a mounted folder are written as you; without it as uid 1000.
# compose.yaml runs cameras permanently.

# What the tests run with.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH=torch==2.13.0
# Optional parts in the image; `saccade doctor` lists them. Another choice: --build-arg EXTRAS="mqtt"
ARG EXTRAS="mqtt onvif mcp ray"
ENV PATH=/opt/saccade/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/saccade
WORKDIR /src
# Dependencies stand in layers of their own: a changed line of the project installs 20 MB and not 55 packages.
# opencv-python without windows (opencv-python-headless) has the same module, and needs no GL and X11 libraries.
COPY pyproject.toml requirements.lock ./
RUN python -c "import re, tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = [one for extra in '$EXTRAS'.split() for one in project['optional-dependencies'][extra]]; \
    wanted = [one for one in project['dependencies'] + extras if re.match('[a-z0-9_-]+', one)[0] != 'torch']; \
    print(*(one.replace('opencv-python', 'opencv-python-headless') for one in wanted), sep='\n')" >wanted.txt
RUN sed 's/^opencv-python==/opencv-python-headless==/' requirements.lock >lock.txt

FROM build AS project
COPY . .
# Beside the virtual environment, so that its files are a layer of their own.
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps --prefix /opt/project .

FROM build AS dependencies-cpu
# In the layer that installs it: torch's tests, C++ headers and test programs are 190 MB. Ray's Java and RLlib 50 MB.
RUN --mount=type=cache,target=/root/.cache/pip pip install "$TORCH" --index-url https://download.pytorch.org/whl/cpu \
    && cd /opt/saccade/lib/python*/site-packages/torch && rm -rf test include \
    && find bin -type f ! -name torch_shm_manager -delete
RUN --mount=type=cache,target=/root/.cache/pip pip install -r wanted.txt -c lock.txt \
    && cd /opt/saccade/lib/python*/site-packages && rm -rf ray/jars ray/rllib ray/llm pip pip-*

FROM build AS dependencies-cuda
# What the usual index has for Linux brings CUDA's libraries with it: only the driver is the machine's.
RUN --mount=type=cache,target=/root/.cache/pip pip install "$TORCH" \
    && cd /opt/saccade/lib/python*/site-packages/torch && rm -rf test \
    && find bin -type f ! -name torch_shm_manager -delete
RUN --mount=type=cache,target=/root/.cache/pip pip install -r wanted.txt -c lock.txt \
    && cd /opt/saccade/lib/python*/site-packages && rm -rf ray/jars ray/rllib ray/llm pip pip-*

FROM python:${PYTHON}-slim AS runtime
# tini is the first process: it passes signals on from the first moment, and collects what child processes leave.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home saccade \
    && install -d -o saccade -g saccade /data
# PyAV's wheels carry x264 and x265: read NOTICE before you pass an image on.
LABEL org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-or-later AND LGPL-3.0-or-later"
COPY LICENSE NOTICE /usr/share/doc/saccade/
# SACCADE_IMAGE: messages about a missing optional part name the build argument instead of pip.
ENV PATH=/opt/saccade/bin:$PATH PYTHONUNBUFFERED=1 SACCADE_IMAGE=1
USER 1000:1000
WORKDIR /data
# `docker stop` is Ctrl-C: what is in flight is finished and files are closed, within the grace period of the caller.
# SIGTERM, as from a service manager, does the same within 5 s. The exit code is 130 after SIGINT, 0 after SIGTERM.
STOPSIGNAL SIGINT
# For `saccade run --http 127.0.0.1:8080`. A run that serves no HTTP is healthy as long as its process is there.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-c", "\
import urllib.error, urllib.request\n\
try: urllib.request.urlopen('http://127.0.0.1:8080/livez', timeout=5)\n\
except urllib.error.HTTPError: raise\n\
except urllib.error.URLError as error:\n\
    if not isinstance(error.reason, ConnectionRefusedError): raise\n"]
ENTRYPOINT ["tini", "--", "saccade"]
CMD ["--help"]

FROM runtime AS cuda
# Triton compiles the engine's kernels for the GPU it finds, and the glue around them with a C compiler.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 1000:1000
# `video` is for decoding and encoding on the GPU.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,video,utility TRITON_CACHE_DIR=/tmp/triton
COPY --from=dependencies-cuda /opt/saccade /opt/saccade
COPY --from=project /opt/project /opt/saccade

# The last one is what a build without --target makes.
FROM runtime AS cpu
COPY --from=dependencies-cpu /opt/saccade /opt/saccade
COPY --from=project /opt/project /opt/saccade
