"""What inference engines, profilers and NCCL print, read into calibrations: `command.ingest` is the way in."""
