"""The CronJob that calibrates the routing."""

from typing import Final

from dps_operator.api import Calibration
from dps_operator.build.gateway import ADMIN_PORT, ADMIN_TOKEN_KEY
from dps_operator.build.pods import credential, pod_template, secret_env
from dps_operator.effective import Router
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest, child_manifest, child_name
from dps_operator.settings import Settings

USER: Final = 65532
LONGEST_CRON_JOB_NAME: Final = 52
"""In characters: Kubernetes appends 11 characters to the names of a CronJob's Jobs."""
RESULT: Final = "/dev/termination-log"
"""The operator reads the result from the termination message of the container, so the Job needs no permissions."""
RESOURCES: Final[Manifest] = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
DEADLINE_SECONDS: Final = 3600
"""Time limit of a calibration, and how late after its scheduled time it may start.

The limit is one of the pod and not of the Job, with which Kubernetes would delete the pod that shows the failure."""


def calibration_cron_job(router: Router, settings: Settings) -> list[Manifest]:
    """The CronJob that runs `dps calibrate`; empty if the spec has no calibration.

    Raises SpecError if the DPSRouter's name is too long for it.
    """
    calibration = router.spec.routing.calibration
    if calibration is None:
        return []
    name = child_name(router, "calibration")
    if len(name) > LONGEST_CRON_JOB_NAME:
        longest = LONGEST_CRON_JOB_NAME - (len(name) - len(router.name))
        raise SpecError(
            f"spec.routing.calibration requires a DPSRouter whose name has at most {longest} characters; remove it, or "
            "choose another name"
        )
    token = credential(router, "gateway", ADMIN_TOKEN_KEY)
    container: Manifest = {
        "name": "calibration",
        "image": settings.lab_image,
        "args": ["calibrate", *_arguments(router, calibration)],
        "env": [secret_env("DPS_ADMIN_TOKEN", token)],
        "resources": RESOURCES,
        "terminationMessagePath": RESULT,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "containers": [container],
        "restartPolicy": "Never",
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    template = pod_template(router, "calibration", settings, pod, user=USER)
    spec = {
        "schedule": calibration.schedule,
        "timeZone": "Etc/UTC",
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": DEADLINE_SECONDS,
        "suspend": router.spec.suspend,
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 1,
        "jobTemplate": {"spec": {"backoffLimit": 0, "template": template}},
    }
    return [child_manifest(router, "CronJob", "calibration", spec=spec)]


def _arguments(router: Router, calibration: Calibration) -> list[str]:
    """The options of `dps calibrate` for the present fleet."""
    spec = router.spec
    host = f"{child_name(router, 'metrics')}.{router.namespace}.svc"
    if spec.gpu_budget is not None and router.allocation is not None:
        total = sum(router.allocation.counts.values())
        fleet = {"budget": str(total), "cooldown": str(spec.gpu_budget.cooldown_seconds)}
    else:
        fleet = {"fleet": ",".join(f"{name}={pool.min_replicas}" for name, pool in router.pools.items())}
    options = {
        "workload": f"http://{host}:{ADMIN_PORT}/decisions",
        **fleet,
        "replicas": str(router.gateway_replicas),
        "cache": "separate" if router.shared_cache is None else "common",
        "hardware": calibration.hardware,
        "algorithm": router.speculation.algorithm.upper(),
        "objective": calibration.objective,
        "recommendation": RESULT,
    }
    one_gpu = ["--one-gpu"] if spec.placement == "SharedGPU" else []
    return [argument for name, value in options.items() for argument in (f"--{name}", value)] + one_gpu
