"""The pools: speculation, scaling, placement, rollouts."""

from e2e.cluster.routers import REMOVED, speculation
from e2e.control_plane.rule_cases.kinds import Accepted, Refused

REFUSED: Refused = {
    "missing draft model": (
        speculation(algorithm="Eagle"),
        "Standalone, Eagle and Eagle3 require speculation.draftModel; set it, or choose Ngram or Suffix",
    ),
    "draft model with Ngram": (
        speculation(algorithm="Ngram", draftModel="m"),
        "speculation.draftModel must not be set with algorithms Ngram and Suffix, which use no draft model",
    ),
    "steps with Ngram": (
        speculation(algorithm="Ngram", steps=3),
        "speculation.steps and speculation.topK must not be set with algorithms Ngram and Suffix",
    ),
    "draftTokens do not match steps": (
        speculation(algorithm="Standalone", draftModel="m", steps=3, draftTokens=8),
        "speculation.draftTokens must be steps + 1 if topK is 1; change or remove speculation.draftTokens",
    ),
    "more draftTokens than the draft tree has": (
        speculation(algorithm="Eagle", draftModel="m", steps=2, topK=2, draftTokens=8),
        "speculation.draftTokens must not exceed the size of the draft tree, 1 + topK + (steps - 1) * topK^2",
    ),
    "replicas and autoscaling of the greedy pool": (
        {"pools": {"greedy": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}}},
        "set either replicas or autoscaling, not both",
    ),
    "replicas with external scaling": (
        {"pools": {"greedy": {"scaling": "External", "replicas": 2}}},
        "replicas and autoscaling must not be set with scaling External",
    ),
    "replicas with a GPU budget": (
        {"gpuBudget": {"gpus": 2}, "pools": {"greedy": {"replicas": 2}}},
        "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget",
    ),
    "GPU budget for less than two replicas": (
        {"gpuBudget": {"gpus": 3}, "engine": {"tensorParallel": 2}},
        "gpuBudget.gpus must be at least 2 * engine.tensorParallel",
    ),
    "two replicas on a shared GPU": (
        {"placement": "SharedGPU", "pools": {"greedy": {"replicas": 2}}},
        "with placement SharedGPU each pool has one replica on one GPU",
    ),
    "sharing without a shared GPU": (
        {"nodePool": {"sharing": {"strategy": "MPS"}}},
        "nodePool.sharing requires placement SharedGPU",
    ),
    "MPS with MIG": (
        {
            "placement": "SharedGPU",
            "nodePool": {"mig": {"profile": "3g.40gb"}, "sharing": {"strategy": "MPS"}},
        },
        "nodePool.mig cannot be combined with sharing strategy MPS",
    ),
    "tensor parallelism over MIG instances": (
        {"nodePool": {"mig": {"profile": "3g.40gb"}}, "engine": {"tensorParallel": 2}},
        "an engine cannot use several MIG instances; remove nodePool.mig or engine.tensorParallel",
    ),
    "name of no MIG profile": (
        {"nodePool": {"mig": {"profile": "half"}}},
        "spec.nodePool.mig.profile in body should match",
    ),
    "surge with Recreate": (
        {"pools": {"greedy": {"strategy": {"type": "Recreate", "maxSurge": 1}}}},
        "strategy.maxSurge and strategy.maxUnavailable must not be set with type Recreate",
    ),
    "neither surge nor unavailable replicas": (
        {"pools": {"speculative": {"strategy": {"maxSurge": "0%", "maxUnavailable": 0}}}},
        "strategy.maxUnavailable must be greater than 0 if strategy.maxSurge is 0",
    ),
    "minReplicas above maxReplicas": (
        {"pools": {"greedy": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}}},
        "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
    ),
    "missing speculation": ({"pools": {"speculative": {"speculation": REMOVED}}}, "Required value"),
}

ACCEPTED: Accepted = {
    "GPU budget": {"gpuBudget": {"gpus": 4}, "engine": {"tensorParallel": 2}},
    "shared GPU": {"placement": "SharedGPU", "pools": {"greedy": {"replicas": 1}}},
    "time-sliced MIG instance": {
        "placement": "SharedGPU",
        "nodePool": {
            "mig": {"profile": "7g.80gb", "strategy": "Mixed"},
            "sharing": {"strategy": "TimeSlicing", "renamed": True},
        },
    },
    "Ngram": speculation(algorithm="Ngram", draftTokens=8),
    "draft tree": speculation(algorithm="Eagle3", draftModel="m", steps=3, topK=4, draftTokens=16),
    "strategy without surge": {"pools": {"greedy": {"strategy": {"maxSurge": 0, "maxUnavailable": "50%"}}}},
    "Recreate": {"pools": {"greedy": {"strategy": {"type": "Recreate"}}}},
    "external scaling": {"pools": {"speculative": {"scaling": "External"}}},
    "resources as numbers": {"pools": {"greedy": {"resources": {"requests": {"cpu": 4, "memory": "8Gi"}}}}},
    "minimal": {},
}
