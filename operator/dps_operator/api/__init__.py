"""The DPSRouter API: the models from which the CRD, its documentation and the chart's copy are generated."""

GROUP = "dpsrouter.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DPSRouter"
PLURAL = "dpsrouters"
SHORT_NAME = "dps"
CATEGORY = "inference"
