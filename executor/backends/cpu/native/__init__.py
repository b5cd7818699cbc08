"""Native kernels of the CPU backend: C++ behind a plain C ABI, built with the package where a compiler is found."""
