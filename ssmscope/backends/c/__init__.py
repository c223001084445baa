"""C kernels for CPUs, compiled on first use by the user's C compiler (`compiler`)."""
