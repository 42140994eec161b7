# syntax=docker/dockerfile:1
#
#   docker build --target control -t argo-moe-rl:0.1.0-control .   # submits, plans, scores, reports: no torch
#   docker build --target cpu     -t argo-moe-rl:0.1.0         .   # every step, on CPU
#   docker build --target gpu     -t argo-moe-rl:0.1.0-gpu     .   # every step, on NVIDIA GPUs, with DeepEP
#
# requirements.lock pins every version; pyproject.toml says which of them an image needs.

ARG PYTHON_IMAGE=python:3.11-slim
# Must bring Python >= 3.11, and the torch of requirements.lock built for its CUDA.
ARG GPU_BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel

FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml .
RUN python -c "import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
extras = project['optional-dependencies']; \
pathlib.Path('control.txt').write_text('\n'.join(project['dependencies'])); \
pathlib.Path('full.txt').write_text('\n'.join(project['dependencies'] + extras['torch'] + extras['tasks']))"

FROM scratch AS sources
COPY pyproject.toml LICENSE /
COPY moe /moe
COPY steps /steps
COPY workflows /workflows
COPY templates /templates
COPY configs /configs

FROM ${PYTHON_IMAGE} AS python
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV PYTHONPATH=/app HOME=/home/moerl
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/moerl moerl
WORKDIR /app
COPY requirements.lock .

FROM python AS control
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    pip install -r /requirements/control.txt -c requirements.lock
COPY --from=sources / ./
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]

FROM python AS cpu
# The CPU build of the locked torch; without this index pip takes the CUDA build, which is several GB larger.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    pip install -r /requirements/full.txt -c requirements.lock --extra-index-url "${TORCH_INDEX_URL}"
COPY --from=sources / ./
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]

FROM ${GPU_BASE_IMAGE} AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The base's torch lies in its system Python, and ours must see it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
ENV PYTHONPATH=/app HOME=/home/moerl
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/moerl moerl
WORKDIR /app
COPY requirements.lock .
# A pip requirement; empty: no DeepEP. (PyPI's own deep-ep is an old source release; this is DeepEP 2.1 as a wheel.)
ARG DEEPEP_REQUIREMENT=sgl-deep-ep==0.1.2.post1
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    pip install -r /requirements/full.txt -c requirements.lock ${DEEPEP_REQUIREMENT}
COPY --from=sources / ./
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]
