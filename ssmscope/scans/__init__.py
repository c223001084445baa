"""Fast scans. One decay per head: `scalar` (Mamba-2), `single` for states of one number (RWKV). A decay per state:
`wide` for wide heads (GLA), `diagonal` for heads of width 1 (Mamba-1), with kernels of C (`native`) and of CUDA
(`fused`)."""
