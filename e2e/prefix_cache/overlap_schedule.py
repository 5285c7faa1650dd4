"""An SGLang plugin with which servers that speculate use the overlap schedule on a CPU, as they do on a GPU.

SGLang 0.5.23 disables this schedule if a server on a CPU speculates. The plugin replaces the function that does so, and
the only Triton kernel that the schedule needs; everything else is SGLang's own. The scheduler starts a batch before it
processes the result of the previous one. On a CPU, streams have no effect, so each batch has been computed when the
scheduler continues.
"""

from typing import Any

DISABLE = "--disable-overlap-schedule"
"""The flag without which a server on a CPU uses the schedule, if it does not speculate or has this plugin."""
CHECK = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
GATHER = "sglang.srt.managers.overlap_utils.gather_spec_extras"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CHECK, leave_enabled, HookType.REPLACE)
    HookRegistry.register(GATHER, gather_rows, HookType.REPLACE)


def leave_enabled(server_args: Any) -> None:
    """Replaces the function that disables the schedule."""


def gather_rows(indices: Any, *buffers: Any) -> tuple[Any, ...]:
    """Replaces the kernel that copies these rows of each buffer. None stands for a buffer that does not exist."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)
