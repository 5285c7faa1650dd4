"""Values of the chart for tests."""

from dps_testkit.cluster.kube import Manifest

DIGEST = "sha256:" + "0" * 64
EVERY_VALUE: Manifest = {
    "global": {"imageRegistry": "mirror:5000", "imagePullSecrets": [{"name": "shared"}]},
    "nameOverride": "router",
    "fullnameOverride": "dps-dps-router-1",
    "commonLabels": {"team": "serving"},
    "image": {
        "repository": "reg/operator",
        "tag": "1",
        "digest": DIGEST,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "pull"}],
    "gatewayImage": {"repository": "reg/gateway", "tag": "2", "digest": "sha256:" + "1" * 64},
    "redisImage": "reg/valkey:8",
    "loaderImage": "reg/rclone:1",
    "labImage": {"repository": "reg/lab", "tag": "3", "digest": "sha256:" + "2" * 64},
    "watchNamespaces": [],
    "crds": {"enabled": True, "keep": False},
    "serviceAccount": {"create": True, "name": "robot", "annotations": {"a": "b"}},
    "rbac": {"create": True, "aggregate": True},
    "replicas": 2,
    "workers": 2,
    "resyncSeconds": 60,
    "verbose": True,
    "resources": {"requests": {"cpu": "1"}},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "revisionHistoryLimit": 3,
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"l": "m"},
    "podAnnotations": {"n": "o"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "ca", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "extra"}}],
    "podSecurityContext": {"runAsNonRoot": True, "runAsUser": 1},
    "securityContext": {"runAsGroup": 1},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"p": "q"}},
        "podMonitor": {"enabled": True, "interval": "5s", "labels": {"p": "q"}},
        "prometheusRule": {"enabled": True, "labels": {"p": "q"}},
        "dashboard": {"enabled": True, "labels": {"grafana_dashboard": "1"}},
    },
}
"""Every value, most of them different from the default."""
