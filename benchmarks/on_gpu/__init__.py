"""The parts of `python -m benchmarks.gpu`: what is measured on a GPU, and how."""
