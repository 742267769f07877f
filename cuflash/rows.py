"""The kernels as data: one Row per kernel, best first.  plan.py takes the first row that accepts.

A row's name is its file (kernels/<name>.cu), its entry point and its line in every report.
"""

from __future__ import annotations

from cuflash.rows_backward import BWD_01, BWD_02
from cuflash.rows_cluster import BWD_07
from cuflash.rows_forward import FWD_01, FWD_02, STD_00
from cuflash.rows_hopper import FWD_06, FWD_07, FWD_08, FWD_09
from cuflash.rows_hopper_backward import BWD_05, BWD_06
from cuflash.rows_mma import FWD_03, FWD_04, FWD_05
from cuflash.rows_mma_backward import BWD_03, BWD_04
from cuflash.rows_persistent import FWD_10

FORWARD = (FWD_10, FWD_09, FWD_08, FWD_07, FWD_06, FWD_05, FWD_04, FWD_03, FWD_02, FWD_01, STD_00)
BACKWARD = (BWD_07, BWD_06, BWD_05, BWD_04, BWD_03, BWD_02, BWD_01, STD_00)
