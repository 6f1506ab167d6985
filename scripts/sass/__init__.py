"""Machine code of the CUDA kernels, as nvdisasm prints it: read, measured, and compared (scripts/cuda-sass)."""
