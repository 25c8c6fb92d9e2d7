"""What the check of the GPU kernels needs: its report, and processes that may hang."""
