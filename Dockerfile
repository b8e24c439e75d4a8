# syntax=docker/dockerfile:1
# One image for every process of a federation; compose.yaml starts them, docs/deploy.md explains them.
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
# The proxy is Debian's nginx: its security fixes come with a new build of the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /build/constraints.txt
COPY --from=build /dist /build/dist
RUN pip install --no-cache-dir --constraint /build/constraints.txt "$(ls /build/dist/*.whl)[flower]" \
    && rm -rf /build
# A new volume takes over the owner of the folder on which it is mounted.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /var/lib/sottovoce sottovoce \
    && install --directory --owner sottovoce --group sottovoce --mode 0700 \
        /etc/sottovoce /var/lib/sottovoce /var/lib/sottovoce-proxy /srv/sottovoce /srv/node
USER 10001
WORKDIR /srv/sottovoce
ENV FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=/var/lib/sottovoce/home
ENTRYPOINT []
CMD ["sottovoce", "--help"]
