# The emulated SGLang server, for clusters without GPUs: the operator starts it with SGLang's command line. Build
# context: the repository root. BASE: the gateway's image, which has all dependencies.
ARG BASE=dps-router/gateway:0.1.0

FROM ${BASE}
COPY lab/dps_local/data/tokenizer /opt/model
COPY lab/dps_local /opt/emulated/dps_local
# The gateway's image does not contain these two packages.
COPY engines /opt/emulated
COPY lab/sglang_launcher /opt/emulated
ENV PYTHONPATH=/opt/emulated
EXPOSE 30000
ENTRYPOINT ["dps"]
CMD ["engine", "--host", "0.0.0.0", "--model-path", "/opt/model"]
