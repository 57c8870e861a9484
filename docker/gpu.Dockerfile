# Worker of the pool `b200`: training, evaluation, export. Generation has images of its own (SGLang, vLLM), so that
# neither can change the other's torch or CUDA.
# docker build -f docker/gpu.Dockerfile -t dflash-gpu:0.1.0 .
# torch is pinned by constraints.txt, CUDA by the build of torch, and both are checked here. To upgrade: change the
# two arguments and constraints.txt in one commit; see "Upgrade torch" in docs/operations.md.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_VERSION=2.13.0
ARG CUDA_VERSION=13.0
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY dflash dflash
COPY tasks tasks
COPY flows flows
COPY embedded embedded
COPY docker/install.sh docker/check_torch.py docker/
RUN sh docker/install.sh /opt/dflash fast,train \
    && /opt/dflash/bin/python docker/check_torch.py "$TORCH_VERSION" "$CUDA_VERSION"

FROM ${PYTHON_IMAGE} AS gpu
# torch.compile makes the launchers of its CUDA kernels at run time with a C compiler; nothing else is built here.
# Debian removes old versions from its archive, so that a pinned one would soon not install.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/dflash --shell /usr/sbin/nologin dflash \
    && install -d -o dflash -g dflash -m 0750 /var/lib/dflash
COPY --chmod=0755 docker/entrypoint.sh /usr/local/bin/entrypoint
ENV PATH=/opt/dflash/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 \
    DFLASH_PROJECT=/var/lib/dflash \
    DFLASH_HOME=/var/lib/dflash \
    PREFECT_HOME=/var/lib/dflash/prefect \
    TRITON_CACHE_DIR=/var/lib/dflash/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/dflash/inductor \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_DEVICE_ORDER=PCI_BUS_ID \
    PYTORCH_ALLOC_CONF=expandable_segments:True
WORKDIR /var/lib/dflash
COPY --from=build /opt/dflash /opt/dflash
COPY deployments /app/deployments
USER 10001:10001
VOLUME /var/lib/dflash
ENTRYPOINT ["entrypoint"]
CMD ["prefect", "worker", "start", "--pool", "b200", "--with-healthcheck", "--no-create-pool-if-not-found"]
