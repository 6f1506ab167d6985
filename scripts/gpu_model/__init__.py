"""A cost model of the GPU path: what each row of docs/performance/gpu.md should show (scripts/gpu-forecast)."""
