# Redis of Debian's, where the official image cannot be pulled. Its binaries run as any user.
ARG BASE
FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null && rm -rf /var/lib/apt/lists/*
CMD ["redis-server"]
