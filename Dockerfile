# The proxy's image. Nothing in it depends on the processor: it builds for amd64 and arm64 alike.
# Any Debian-like image with Python 3.11 or newer, venv and pip can be the base:
#   docker build --build-arg BASE_IMAGE=python:3.13-slim --tag gpu-lease-proxy:local .
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The venv gets no pip of its own: the base image's pip installs into it and stays behind in this stage.
RUN python -m venv --without-pip /opt/gpu-lease-proxy
COPY requirements.lock ./
RUN python -m pip --python /opt/gpu-lease-proxy install --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY proxy ./proxy
RUN python -m pip --python /opt/gpu-lease-proxy install --no-deps --no-build-isolation . \
    && python -m pip --python /opt/gpu-lease-proxy uninstall --yes flit-core

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gpu-lease-proxy" \
      org.opencontainers.image.description="A sidecar for llama-swap: every model waits for its turn on the GPU" \
      org.opencontainers.image.licenses="MIT"
# 10001 is also the user of llama-swap's non-root images. The two volumes are all that this user can write to, so the
# root filesystem may be read-only.
RUN groupadd --gid 10001 lease \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin lease \
    && install --directory --owner=10001 --group=10001 --mode=0750 /data /spool
COPY --from=build /opt/gpu-lease-proxy /opt/gpu-lease-proxy
# Every key in it is commented out; mount your own /config over it.
COPY config/proxy.yaml /config/proxy.yaml
ENV PATH=/opt/gpu-lease-proxy/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GPU_LEASE_CONFIG=/config/proxy.yaml \
    GPU_LEASE_DATA_DIR=/data \
    GPU_LEASE_LISTEN_HOST=0.0.0.0 \
    GPU_LEASE_SPOOL_DIR=/spool
USER 10001:10001
VOLUME ["/data", "/spool"]
EXPOSE 9393
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 CMD ["gpu-lease-proxy", "healthcheck"]
ENTRYPOINT ["gpu-lease-proxy"]
CMD ["serve"]
