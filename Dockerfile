# syntax=docker/dockerfile:1
#
#   docker build --target control -t argo-moe-rl:0.1.0-control .   # submits, watches, checks: no torch
#   docker build --target cpu     -t argo-moe-rl:0.1.0         .   # every step, on CPU
#   docker build --target gpu     -t argo-moe-rl:0.1.0-gpu     .   # every step, on NVIDIA GPUs, with DeepEP and EFA
#   docker build --target engine  -t argo-moe-rl:0.1.0-engine  .   # a vLLM server and the host beside it
#
# requirements.lock pins every version; pyproject.toml says which of them an image needs. The OCI labels say what went in,
# and /etc/argo-moe-rl/image.json says the same to the steps: every training attempt records it with its transport.
#
# For images that are the same byte for byte, pin the bases by digest: --build-arg PYTHON_IMAGE=python@sha256:...

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
# Must bring Python >= 3.11, and the torch of requirements.lock built for its CUDA. With nvcc: DeepEP 2 compiles its kernels
# when they are first used.
ARG GPU_BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel

# Of rollout engines: the server with its own Python and torch. For SGLang lmsysorg/sglang:v0.5.23, and -t ...-sglang.
ARG ENGINE_BASE_IMAGE=vllm/vllm-openai:v0.32.0

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
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG PYTHON_IMAGE
COPY <<JSON /etc/argo-moe-rl/image.json
{"target": "control", "version": "${VERSION}", "revision": "${REVISION}", "base": "${PYTHON_IMAGE}"}
JSON
LABEL org.opencontainers.image.title="argo-moe-rl control" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      argo-moe-rl.target="control"
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]

FROM python AS cpu
# The CPU build of the locked torch; without this index pip takes the CUDA build, which is several GB larger.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    pip install -r /requirements/full.txt -c requirements.lock --extra-index-url "${TORCH_INDEX_URL}"
COPY --from=sources / ./
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG PYTHON_IMAGE
COPY <<JSON /etc/argo-moe-rl/image.json
{"target": "cpu", "version": "${VERSION}", "revision": "${REVISION}", "base": "${PYTHON_IMAGE}"}
JSON
LABEL org.opencontainers.image.title="argo-moe-rl" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      argo-moe-rl.target="cpu"
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]

FROM ${GPU_BASE_IMAGE} AS gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The base's torch lies in its system Python, and ours must see it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
ENV PYTHONPATH=/app HOME=/home/moerl
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/moerl moerl
# libfabric and the NCCL plugin for EFA (1.50.0 brings aws-ofi-nccl 1.21, the first with GIN); the kernel module is the
# host's. Empty: the base image has them, or the cluster has no EFA.
ARG EFA_INSTALLER_VERSION=1.50.0
RUN if [ -n "${EFA_INSTALLER_VERSION}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ca-certificates curl pciutils \
      && mkdir /tmp/efa && cd /tmp/efa \
      && curl --fail --silent --show-error --location --output installer.tar.gz \
         "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
      && tar --extract --strip-components=1 --file installer.tar.gz \
      && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
      && rm -rf /tmp/efa /var/lib/apt/lists/*; \
    fi
WORKDIR /app
COPY requirements.lock .
# Pip requirements; empty: no DeepEP. This is DeepEP 2.1 as a wheel for the locked torch: 0.1.2.post1 is for the next one,
# and PyPI's own deep-ep is an old source release.
ARG DEEPEP_REQUIREMENT=sgl-deep-ep==0.1.2
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    pip install -r /requirements/full.txt -c requirements.lock ${DEEPEP_REQUIREMENT}
COPY --from=sources / ./
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG GPU_BASE_IMAGE
COPY <<JSON /etc/argo-moe-rl/image.json
{"target": "gpu", "version": "${VERSION}", "revision": "${REVISION}", "base": "${GPU_BASE_IMAGE}", "deepep": "${DEEPEP_REQUIREMENT}", "efa_installer": "${EFA_INSTALLER_VERSION}"}
JSON
LABEL org.opencontainers.image.title="argo-moe-rl gpu" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${GPU_BASE_IMAGE}" \
      argo-moe-rl.target="gpu" \
      argo-moe-rl.deepep="${DEEPEP_REQUIREMENT}" \
      argo-moe-rl.efa_installer="${EFA_INSTALLER_VERSION}"
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]

FROM ${ENGINE_BASE_IMAGE} AS engine
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The host that starts the server has a Python of its own, as locked: the server's torch is another one.
ENV PATH=/opt/moerl/bin:${PATH} MOERL_ENGINE_PYTHON=/usr/bin/python3
ENV PYTHONPATH=/app HOME=/home/moerl
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/moerl moerl
# libfabric for what the server's NCCL sets up over EFA. Empty: the base image has it, or the cluster has no EFA.
ARG EFA_INSTALLER_VERSION=1.50.0
RUN if [ -n "${EFA_INSTALLER_VERSION}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ca-certificates curl pciutils \
      && mkdir /tmp/efa && cd /tmp/efa \
      && curl --fail --silent --show-error --location --output installer.tar.gz \
         "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER_VERSION}.tar.gz" \
      && tar --extract --strip-components=1 --file installer.tar.gz \
      && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
      && rm -rf /tmp/efa /var/lib/apt/lists/*; \
    fi
WORKDIR /app
COPY requirements.lock .
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=from=requirements,source=/requirements,target=/requirements \
    /usr/bin/python3 -m venv /opt/moerl \
    && pip install -r /requirements/full.txt -c requirements.lock --extra-index-url "${TORCH_INDEX_URL}"
COPY --from=sources / ./
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG ENGINE_BASE_IMAGE
COPY <<JSON /etc/argo-moe-rl/image.json
{"target": "engine", "version": "${VERSION}", "revision": "${REVISION}", "base": "${ENGINE_BASE_IMAGE}", "efa_installer": "${EFA_INSTALLER_VERSION}"}
JSON
LABEL org.opencontainers.image.title="argo-moe-rl engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${ENGINE_BASE_IMAGE}" \
      argo-moe-rl.target="engine" \
      argo-moe-rl.efa_installer="${EFA_INSTALLER_VERSION}"
USER 10001:10001
CMD ["python", "-m", "workflows", "--help"]
