"""Options that have a few named values."""

from pallas_kernels.values import one_of as one_of
