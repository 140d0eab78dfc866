"""What holds for every test."""

import os

# Before anything loads numpy: the matrices are small, and threads that wait for each other only take time.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
