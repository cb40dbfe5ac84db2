#!/bin/bash
# Trains on a Ray cluster that runs already, as a job of its own that goes on when this terminal is closed.
#
#     CLUSTER=http://head:8265 RUNS=/shared/runs examples/ray_job.sh --env math_verify --model path/or/hub-id
#
# Everything after the script's name is given to `envgym train`. RUNS must be a folder that all machines have.

set -euo pipefail
CLUSTER=${CLUSTER:-http://127.0.0.1:8265}
RUNS=${RUNS:-$PWD/runs}

# The job runs on the cluster, which is then the one that is there: RAY_ADDRESS=auto.
ray job submit --address "$CLUSTER" --working-dir . --runtime-env-json '{"env_vars": {"RAY_ADDRESS": "auto"}}' -- \
    envgym train --runtime ray runs_dir="$RUNS" "$@"
