"""The DPSRouter API. The CRD and its reference are generated from these models."""

GROUP = "dpsrouter.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DPSRouter"
PLURAL = "dpsrouters"
SHORT_NAME = "dps"
CATEGORY = "inference"
