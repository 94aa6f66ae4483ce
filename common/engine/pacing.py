"""When a decode worker may begin its next step. Pure.

A step sooner than a reader needs it takes cores from prompts that others wait for. So while another worker of the host
has work, steps begin no sooner than the target for the time between tokens allows; alone, at once.
"""


def next_start_s(last_start_s: float, itl_target_s: float, *, others_want_cores: bool) -> float:
    """The earliest start of the step after the one that began at last_start_s. itl_target_s: 0 for no pacing."""
    return last_start_s + itl_target_s if others_want_cores else last_start_s
