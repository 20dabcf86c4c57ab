"""`ktconvert cpu` with the workers of a Ray cluster: with_ray.py ADDRESS INPUT OUTPUT METHOD

ray start --head --resources '{"unit": 1}'                          once, and on each other host:
ray start --address HOST:6379 --resources '{"unit": 1}'
python with_ray.py HOST:6379 /shared/DeepSeek-V3.1 /shared/DeepSeek-V3.1-INT8 int8
"""

import sys
from concurrent.futures import Executor

import ray
from convert import convert


class RayExecutor(Executor):
    """Each task takes one `unit` of a host's resources; Ray gives the tasks of a lost host to others."""

    def __init__(self, address):
        ray.init(address=address)
        self.options = {"num_cpus": 0, "resources": {"unit": 1}}

    def submit(self, fn, /, *args, **kwargs):
        return ray.remote(**self.options)(fn).remote(*args, **kwargs).future()

    def shutdown(self, wait=True, *, cancel_futures=False):
        ray.shutdown()  # leaves the cluster, which is its owner's


if __name__ == "__main__":
    with RayExecutor(sys.argv[1]) as executor:
        convert(executor, *sys.argv[2:])
