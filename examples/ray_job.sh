#!/bin/bash
# Trains on an existing Ray cluster, as a job that continues when this terminal is closed.
#
#     CLUSTER=http://head:8265 RUNS=/shared/runs examples/ray_job.sh --env math_verify --model path/or/hub-id
#
# All arguments are passed to `envgym train`. RUNS must be a folder shared by all nodes.

set -euo pipefail
CLUSTER=${CLUSTER:-http://127.0.0.1:8265}
RUNS=${RUNS:-$PWD/runs}

# The job runs on a node of the cluster, so that RAY_ADDRESS=auto finds it.
ray job submit --address "$CLUSTER" --working-dir . --runtime-env-json '{"env_vars": {"RAY_ADDRESS": "auto"}}' -- \
    envgym train --runtime ray runs_dir="$RUNS" "$@"
