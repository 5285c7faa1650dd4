# The emulated engine's image, for clusters without a GPU: the operator starts it as it starts SGLang. Context: the
# repository's root. BASE: the gateway's image, which has everything that it needs.
ARG BASE=dps-router/gateway:0.1.0

FROM ${BASE}
COPY local/dps_local/data/tokenizer /opt/model
COPY local/sglang_launcher /opt/sglang_launcher
ENV PYTHONPATH=/opt/sglang_launcher
EXPOSE 30000
ENTRYPOINT ["dps"]
CMD ["engine", "--host", "0.0.0.0", "--model-path", "/opt/model"]
