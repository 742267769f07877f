"""`cuflash bench`: what attention costs here, beside everyone else, with every result checked.

| file | what |
|---|---|
| shapes.py, suites.py | what is measured: shapes, and lists of them by name |
| inputs.py | their arrays, and FLOPs counted from the mask |
| contenders.py | cuflash's kernels, the NumPy path, the matmul |
| peer.py, peers*.py | other libraries |
| probe.py | each peer tried in a child process first |
| timing.py, meters.py | clocks, shuffled rounds, CUDA graphs; memory |
| truth.py | sampled rows against the float64 reference |
| run.py, ahead.py | one run of all that; what is compiled before |
| report.py, plots.py, markdown.py | tables, plots, the READMEs' tables |
| against.py, profile.py | regressions; Nsight Compute |
| command.py | the command line |
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """`cuflash bench` with these arguments; returns the exit code."""
    from cuflash.bench import command

    return command.main(arguments)
