# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Environment of the tests. Set here because torch and vLLM read it on import."""

import os

os.environ.update(
    {
        # Nothing is fetched and nothing is reported.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The models are small: threads that wait for each other cost more than they
        # compute, the more so when something else has a core.
        "OMP_NUM_THREADS": "1",
        # vLLM binds every worker to the same core; two engines may run at a time.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    }
)


def pytest_terminal_summary(terminalreporter):
    """Show the figures that tests have recorded as properties."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
