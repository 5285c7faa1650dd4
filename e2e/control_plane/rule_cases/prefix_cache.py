"""The common prefix cache."""

from e2e.control_plane.rule_cases.kinds import Accepted, Immutable, Refused

REFUSED: Refused = {
    "common prefix cache without a directory": (
        {"prefixCache": {"mode": "Common", "size": "1Gi"}},
        "mode Common with backend File requires prefixCache.file and prefixCache.size",
    ),
    "common prefix cache without a size": (
        {"prefixCache": {"mode": "Common", "file": {"hostPath": "/mnt/kv"}}},
        "mode Common with backend File requires prefixCache.file and prefixCache.size",
    ),
    "prefix cache of size 0": (
        {"prefixCache": {"size": 0}},
        "prefixCache.size must be greater than 0",
    ),
    "prefix cache larger than its claim": (
        {"prefixCache": {"size": "2Gi", "file": {"claim": {"size": "1Gi"}}}},
        "prefixCache.size must not exceed prefixCache.file.claim.size",
    ),
    "prefix cache in two directories": (
        {"prefixCache": {"file": {"hostPath": "/mnt/kv", "existingClaim": "kv"}}},
        "set exactly one of file.hostPath, file.existingClaim and file.claim",
    ),
    "prefix cache without a directory in file": (
        {"prefixCache": {"file": {}}},
        "set exactly one of file.hostPath, file.existingClaim and file.claim",
    ),
    "prefix cache in a relative directory": (
        {"prefixCache": {"file": {"hostPath": "mnt/kv"}}},
        "should match",
    ),
    "unknown backend of the prefix cache": ({"prefixCache": {"backend": "NFS"}}, "Unsupported value"),
    "Mooncake without settings": (
        {"prefixCache": {"mode": "Common", "backend": "Mooncake"}},
        "mode Common with backend Mooncake requires prefixCache.mooncake",
    ),
    "Mooncake in a directory": (
        {"prefixCache": {"backend": "Mooncake", "file": {"hostPath": "/mnt/kv"}}},
        "prefixCache.file, prefixCache.size and prefixCache.minFree require backend File",
    ),
    "Mooncake with minimum free space": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": "1Gi"}, "minFree": "1Gi"}},
        "prefixCache.file, prefixCache.size and prefixCache.minFree require backend File",
    ),
    "Mooncake's settings for another backend": (
        {"prefixCache": {"mooncake": {"segmentSize": "1Gi"}}},
        "prefixCache.mooncake requires backend Mooncake",
    ),
    "Mooncake without a segment size": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {}}},
        "Required value",
    ),
    "Mooncake segments of size 0": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": 0}}},
        "mooncake.segmentSize must be greater than 0",
    ),
    "two Mooncake masters": (
        {
            "prefixCache": {
                "backend": "Mooncake",
                "mooncake": {"segmentSize": "1Gi", "master": {}, "externalMaster": "m:50051"},
            }
        },
        "set either mooncake.master or mooncake.externalMaster, not both",
    ),
    "Mooncake master without a port": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": "1Gi", "externalMaster": "m"}}},
        "should match",
    ),
    "RDMA devices over TCP": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": "1Gi", "devices": ["mlx5_0"]}}},
        "mooncake.devices requires protocol RDMA",
    ),
}

ACCEPTED: Accepted = {
    "common prefix cache": {
        "prefixCache": {
            "mode": "Common",
            "file": {"claim": {"size": "500Gi"}},
            "size": "400Gi",
            "minFree": "10Gi",
        }
    },
    "common prefix cache in a directory of the node": {
        "prefixCache": {"mode": "Common", "file": {"hostPath": "/mnt/kv"}, "size": 1073741824}
    },
    "common prefix cache in Mooncake": {
        "prefixCache": {
            "mode": "Common",
            "backend": "Mooncake",
            "mooncake": {"segmentSize": "64Gi", "protocol": "RDMA", "devices": ["mlx5_0"], "master": {}},
        }
    },
    "external Mooncake master": {
        "prefixCache": {
            "mode": "Common",
            "backend": "Mooncake",
            "mooncake": {"segmentSize": 1073741824, "externalMaster": "mooncake.storage.svc:50051"},
        }
    },
    "separate prefix caches": {"prefixCache": {}},
}

IMMUTABLE: Immutable = {
    "storage class of the prefix cache": (
        {"prefixCache": {"file": {"claim": {"size": "1Gi"}}}},
        {"prefixCache": {"file": {"claim": {"size": "1Gi", "storageClassName": "fast"}}}},
        "claim.storageClassName cannot be changed",
    ),
    "smaller volume of the prefix cache": (
        {"prefixCache": {"file": {"claim": {"size": "2Gi"}}}},
        {"prefixCache": {"file": {"claim": {"size": "1Gi"}}}},
        "claim.size cannot be decreased",
    ),
}
