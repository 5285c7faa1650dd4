# Redis from Debian's packages, for machines that cannot pull the official image. Runs as any user.
ARG BASE
FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null && rm -rf /var/lib/apt/lists/*
CMD ["redis-server"]
