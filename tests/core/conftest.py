"""The number of hypothesis examples: the default, or few fixed ones for mutation testing (`ROLLOUT_EXAMPLES=few`)."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

settings.register_profile("core", parent=settings(), deadline=None)
settings.register_profile(
    "core-few",
    parent=settings(),
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
    print_blob=False,
)
settings.load_profile("core-few" if os.environ.get("ROLLOUT_EXAMPLES") == "few" else "core")
