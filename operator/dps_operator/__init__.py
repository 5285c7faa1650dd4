"""The control plane: a Kubernetes operator that turns one DPSRouter object into the whole deployment."""
