"""The common prefix cache."""

from e2e.control_plane.rule_cases.kinds import Accepted, Refused

REFUSED: Refused = {
    "common prefix cache without Mooncake": (
        {"prefixCache": {"mode": "Common"}},
        "mode Common requires prefixCache.mooncake",
    ),
    "Mooncake without a segment size": (
        {"prefixCache": {"mooncake": {}}},
        "Required value",
    ),
    "Mooncake segments of size 0": (
        {"prefixCache": {"mooncake": {"segmentSize": 0}}},
        "mooncake.segmentSize must be greater than 0",
    ),
    "two Mooncake masters": (
        {
            "prefixCache": {
                "mooncake": {"segmentSize": "1Gi", "master": {}, "externalMaster": "m:50051"},
            }
        },
        "set either mooncake.master or mooncake.externalMaster, not both",
    ),
    "Mooncake master without a port": (
        {"prefixCache": {"mooncake": {"segmentSize": "1Gi", "externalMaster": "m"}}},
        "should match",
    ),
    "RDMA devices over TCP": (
        {"prefixCache": {"mooncake": {"segmentSize": "1Gi", "devices": ["mlx5_0"]}}},
        "mooncake.devices requires protocol RDMA",
    ),
}

ACCEPTED: Accepted = {
    "common prefix cache in Mooncake": {
        "prefixCache": {
            "mode": "Common",
            "mooncake": {"segmentSize": "64Gi", "protocol": "RDMA", "devices": ["mlx5_0"], "master": {}},
        }
    },
    "external Mooncake master": {
        "prefixCache": {
            "mode": "Common",
            "mooncake": {"segmentSize": 1073741824, "externalMaster": "mooncake.storage.svc:50051"},
        }
    },
    "separate prefix caches": {"prefixCache": {}},
}
