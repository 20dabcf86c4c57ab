#!/bin/bash
# One conversion on the nodes of a SLURM job: sbatch --nodes 8 slurm.sh -i INPUT -o OUTPUT --quant-method int8
#SBATCH --job-name=ktconvert
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Run it in a folder that all nodes share. What it does not finish, a second job with the same command does.
set -euo pipefail
file=$PWD/scheduler-$SLURM_JOB_ID.json
dask scheduler --scheduler-file "$file" --port 0 --no-dashboard --idle-timeout 600 &
srun dask worker --scheduler-file "$file" --nthreads 1 --resources unit=1 --memory-limit 0 --death-timeout 120 \
    --no-dashboard &
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -f "$file"' EXIT
until [ -s "$file" ]; do sleep 1; done
ktconvert cpu "$@" --executor "dask:$file"
