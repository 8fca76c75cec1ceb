"""Training samples in the shapes that trainers and files want. None of it needs more than the client itself, but for Parquet.

* `to_verl`: the fields of verl's AgentLoopOutput; `to_trl`: what a rollout function of TRL's GRPOTrainer returns.
* `to_dict`, `from_dict`: a plain dictionary, ready for JSON.
* `write_jsonl`, `read_jsonl`: one sample on each line.
* `write_parquet`, `read_parquet`: with `rollout-server[parquet]`.
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
