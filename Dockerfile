# One image for the server, the separate gateway and the strict trainer:
#   docker build -t rollout-server .
#   docker run -p 127.0.0.1:9000:9000 -p 127.0.0.1:50051:50051 rollout-server                # the calculator, for this host only
#   docker run -p 9000:9000 -p 50051:50051 -v "$PWD:/srv:ro" -v rollout-journal:/var/lib/rollout rollout-server serve weather.py:Weather
#   docker run -p 9000:9000 -e ROLLOUT_SERVERS=server:50051 rollout-server gateway
# The digest is that of the tag's multi-architecture index. Change both together (`docker buildx imagetools inspect TAG`).
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

FROM base AS build
WORKDIR /build
COPY deploy/build.lock deploy/server.lock ./
# The virtual environment has no pip: the final image must not install anything.
RUN pip install --require-hashes --only-binary :all: -r build.lock \
    && python -m venv --without-pip /opt/rollout \
    && pip --python /opt/rollout/bin/python install --require-hashes --only-binary :all: -r server.lock
COPY pyproject.toml README.md LICENSE ./
COPY generated generated
COPY server server
COPY gateway gateway
RUN python -m hatchling build -t wheel -d wheel \
    && pip --python /opt/rollout/bin/python install --no-deps wheel/*.whl
COPY deploy/healthcheck.py /opt/rollout/healthcheck.py

FROM base
RUN groupadd --gid 10001 rollout \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/rollout --shell /usr/sbin/nologin rollout \
    && install --directory --owner rollout --group rollout /var/cache/rollout \
    && install --directory --owner rollout --group rollout --mode 0700 /var/lib/rollout
COPY --from=build /opt/rollout /opt/rollout
ENV PATH=/opt/rollout/bin:$PATH \
    HF_HOME=/var/cache/rollout \
    HF_HUB_DISABLE_TELEMETRY=1 \
    ROLLOUT_JOURNAL=/var/lib/rollout/journal \
    ROLLOUT_LOG_FORMAT=json \
    ROLLOUT_SERVER_HOST=0.0.0.0 \
    ROLLOUT_GATEWAY_HOST=0.0.0.0
USER 10001:10001
# Agent modules and `.env` are read from this directory.
WORKDIR /srv
# Cache of tokenizers from the Hugging Face Hub, and the journal of the server. A journal outlives the container only on a volume
# with a name, on a local disk, for one server: `docker run -v rollout-journal:/var/lib/rollout`.
VOLUME /var/cache/rollout /var/lib/rollout
EXPOSE 9000 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "/opt/rollout/healthcheck.py"]
ENTRYPOINT ["rollout"]
CMD ["serve"]
