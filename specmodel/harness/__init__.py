"""The measuring harness: CUDA C++ sources, and what builds them, plans, measures and writes a calibration."""
