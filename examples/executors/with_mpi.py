"""`ktconvert cpu` with the ranks of an MPI job: with_mpi.py INPUT OUTPUT METHOD

mpiexec -n 9 --map-by ppr:1:node --bind-to none python -m mpi4py.futures with_mpi.py \
    /shared/DeepSeek-V3.1 /shared/DeepSeek-V3.1-INT8 int8

Rank 0 coordinates, the others make units. --bind-to none: else Open MPI may bind a rank to one CPU.
"""

import sys

from convert import convert
from mpi4py.futures import MPIPoolExecutor

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        convert(executor, *sys.argv[1:])
