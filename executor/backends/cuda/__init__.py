"""The CUDA backend: kernels compiled at run time from cuda/, launched on torch's stream."""
