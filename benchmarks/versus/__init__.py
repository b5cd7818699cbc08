"""Octavo beside other systems on the same requests, model and machine, in turns: `python -m benchmarks.versus`."""
