"""Fast scans: `scalar` for one decay per head (Mamba-2), `diagonal` for a decay per state (Mamba-1)."""
