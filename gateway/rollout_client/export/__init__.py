"""Export of training samples to trainers and files. Only Parquet needs an additional dependency.

* `to_verl`: the fields of verl's AgentLoopOutput.
* `to_trl`: the return value of a rollout function of TRL's GRPOTrainer.
* `to_dict`, `from_dict`: a dictionary of JSON values.
* `write_jsonl`, `read_jsonl`: JSON Lines, one sample per line.
* `write_parquet`, `read_parquet`: Parquet, one row per sample; needs the extra `rollout-server[parquet]`.
"""

from __future__ import annotations

from rollout_client.export.json_lines import from_dict, read_jsonl, to_dict, write_jsonl
from rollout_client.export.parquet import read_parquet, write_parquet
from rollout_client.export.trl import TrlOutput, to_trl
from rollout_client.export.verl import VerlMetrics, VerlOutput, to_verl

__all__ = [
    "TrlOutput",
    "VerlMetrics",
    "VerlOutput",
    "from_dict",
    "read_jsonl",
    "read_parquet",
    "to_dict",
    "to_trl",
    "to_verl",
    "write_jsonl",
    "write_parquet",
]
