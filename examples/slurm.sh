#!/bin/bash
# Trains on several nodes of a Slurm cluster: starts a Ray cluster on them, and the run on it.
#
#     sbatch --nodes 2 --gpus-per-node 8 examples/slurm.sh --env math_verify --model path/or/hub-id workers.ranks=8
#
# All arguments are passed to `envgym train`. RUNS must be a folder shared by all nodes.
#SBATCH --job-name envgym
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive

set -euo pipefail
RUNS=${RUNS:-$SLURM_SUBMIT_DIR/runs}
PORT=${PORT:-6379}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS=$HEAD:$PORT

# One task per node: the first starts the head of the cluster, and the others join it; all end with the job.
srun --overlap bash -c "
    if [ \"\$SLURM_NODEID\" = 0 ]; then
        ray start --head --port $PORT --block
    else
        until ray start --address $RAY_ADDRESS --block; do sleep 2; done
    fi" &

until [ "$(ray status 2>/dev/null | grep -c '^ 1 node_')" -ge "$SLURM_JOB_NUM_NODES" ]; do sleep 2; done
envgym plan --runtime ray "$@"
envgym train --runtime ray runs_dir="$RUNS" "$@"
